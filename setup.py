"""Compiles the engine's step for a wheel: 40 % less host time a sequence. An editable installation runs the sources as they are."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# What a step does for each of its sequences. What is compiled can be neither copied, pickled nor derived from, and checks types.
_STEP = [
    "outrider/lm/pages.py",
    "outrider/messages.py",
    "verifier_svc/acceptance.py",
    "verifier_svc/commit.py",
    "verifier_svc/acceptance_rate.py",
    "verifier_svc/drafters.py",
    "verifier_svc/drafting.py",
    "verifier_svc/engine.py",
    "verifier_svc/outgoing.py",
    "verifier_svc/outputs.py",
    "verifier_svc/forward_cost.py",
    "verifier_svc/goodput.py",
    "verifier_svc/plan.py",
    "verifier_svc/planner.py",
    "verifier_svc/rule_choice.py",
    "verifier_svc/scheduler.py",
    "verifier_svc/sequence.py",
    "verifier_svc/step_clock.py",
    "verifier_svc/trie.py",
    "verifier_svc/verification.py",
    "verifier_svc/waiting.py",
]


def _compiled() -> list[Extension]:
    if "editable_wheel" in sys.argv or not {"bdist_wheel", "build_ext"} & set(sys.argv):
        return []
    from mypyc.build import mypycify

    # What is imported from elsewhere may not be installed where this is built, and what the sources are worth `make lint` says.
    flags = ["--config-file=", "--ignore-missing-imports", "--follow-imports=skip"]
    try:
        extensions: list[Extension] = mypycify([*flags, *_STEP], opt_level="1", debug_level="0")
    except SystemExit:  # of a mypy that finds fault with what others did not
        print("warning: the engine's step is not compiled, since mypy refuses it", file=sys.stderr)
        return []
    for extension in extensions:
        # As the C sources are; and a warning of some compiler is no reason to do without.
        extension.optional = True
        extension.extra_compile_args.append("-Wno-error")
    return extensions


class _AllOrNothing(build_ext):
    """The step's modules are shells around one library, and without it none of them could be imported."""

    def build_extensions(self) -> None:
        super().build_extensions()
        paths = [Path(self.get_ext_fullpath(extension.name)) for extension in _EXTENSIONS]
        if not all(path.exists() for path in paths):
            for path in paths:
                path.unlink(missing_ok=True)


_EXTENSIONS = _compiled()
setup(ext_modules=_EXTENSIONS, cmdclass={"build_ext": _AllOrNothing})
