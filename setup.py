"""Compiles the engine's step for a wheel, which halves its host time; an editable installation runs the sources as they are."""

import sys

from setuptools import Extension, setup

# What a step does for each of its sequences.
_STEP = [
    "outrider/lm/pages.py",
    "outrider/messages.py",
    "verifier_svc/acceptance.py",
    "verifier_svc/chunks.py",
    "verifier_svc/depth.py",
    "verifier_svc/drafters.py",
    "verifier_svc/drafting.py",
    "verifier_svc/engine.py",
    "verifier_svc/judging.py",
    "verifier_svc/outgoing.py",
    "verifier_svc/planning.py",
    "verifier_svc/scheduler.py",
    "verifier_svc/sequence.py",
    "verifier_svc/trie.py",
    "verifier_svc/trust.py",
]


def _compiled() -> list[Extension]:
    if "editable_wheel" in sys.argv or not {"bdist_wheel", "build_ext"} & set(sys.argv):
        return []
    from mypyc.build import mypycify

    # What is imported from elsewhere may not be installed where this is built, and what the sources are worth `make lint` says.
    flags = ["--config-file=", "--ignore-missing-imports", "--follow-imports=skip"]
    extensions: list[Extension] = mypycify([*flags, *_STEP], opt_level="1", debug_level="0")
    for extension in extensions:
        extension.optional = True  # as the C sources are
    return extensions


setup(ext_modules=_compiled())
