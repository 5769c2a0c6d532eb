"""Builds the C kernels for each kind of processor; for a wheel, also compiles the engine's step.

The compiled step takes 40 % less host time per sequence than the step's Python sources, which an
editable installation runs.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_KERNELS = Path("outrider/lm/cpu/kernels")
_SOURCES = ["paged_attention.c", "decoder.c", "decoder_float32.c", "decoder_int8.c"]
# Compiler flags of one library for each kind of processor. Setup builds only the libraries for the
# compiler's architecture. A processor with AVX512-BF16 has AVX512-VNNI as well. Each library is
# optional: without a C compiler, the installation goes on without the libraries.
_BUILDS = {
    "_cpu": [],
    "_cpu_avx2": ["-march=x86-64-v3"],
    "_cpu_avx512": ["-march=x86-64-v4"],
    "_cpu_avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "_cpu_amx": [
        "-march=x86-64-v4",
        "-mamx-tile",
        "-mamx-bf16",
        "-mamx-int8",
        "-mavx512bf16",
        "-mavx512vnni",
    ],
    # Each processor with bf16 and i8mm also has all of armv8.2-a, but some lack parts of armv8.6-a.
    "_cpu_arm_dot": ["-march=armv8.2-a+dotprod"],
    "_cpu_arm_bf16": ["-march=armv8.2-a+bf16+i8mm"],
}
_ARCHITECTURES = {"_cpu_avx": "x86_64", "_cpu_amx": "x86_64", "_cpu_arm": "aarch64"}


def _kernels() -> list[Extension]:
    """Return one extension for each kind of processor, of all architectures."""
    headers_and_sources = [str(path) for path in sorted(_KERNELS.glob("*.[ch]"))]
    extensions = []
    for name, flags in _BUILDS.items():
        sources = [*_SOURCES, "amx_attention.c"] if name == "_cpu_amx" else _SOURCES
        extension = Extension(
            f"outrider.lm.cpu.{name}",
            [str(_KERNELS / source) for source in sources],
            depends=headers_and_sources,
            extra_compile_args=["-O3", "-g0", "-fopenmp", "-fno-math-errno", "-Wno-psabi", *flags],
            extra_link_args=["-fopenmp", "-lm"],
            optional=True,
        )
        extensions.append(extension)
    return extensions


def _is_for(extension: Extension, machine: str) -> bool:
    """Return True if an extension's code can run on a machine such as `aarch64-linux-gnu`."""
    library = extension.name.rpartition(".")[2]
    needed = [needed for start, needed in _ARCHITECTURES.items() if library.startswith(start)]
    return not needed or machine.startswith(needed[0])


# The modules that a step runs for each of its sequences. Compiled classes check types, and cannot
# be copied, pickled or derived from.
_STEP = [
    "outrider/lm/pages.py",
    "outrider/protocol/draft_messages.py",
    "outrider/protocol/messages.py",
    "outrider/protocol/token_tree.py",
    "verifier_svc/verification/acceptance.py",
    "verifier_svc/verification/draft.py",
    "verifier_svc/verification/rows.py",
    "verifier_svc/verification/tree_walk.py",
    "verifier_svc/engine/commit.py",
    "verifier_svc/policy/speculation_budget.py",
    "verifier_svc/state/acceptance_rate.py",
    "verifier_svc/state/drafter.py",
    "verifier_svc/state/merged_tries.py",
    "verifier_svc/state/scheduled_sequence.py",
    "verifier_svc/drafts/new_assignment.py",
    "verifier_svc/drafts/draft_message.py",
    "verifier_svc/drafts/roster.py",
    "verifier_svc/drafts/exchange.py",
    "verifier_svc/engine/load_meter.py",
    "verifier_svc/engine/loop.py",
    "verifier_svc/engine/outbox.py",
    "verifier_svc/engine/output_chunks.py",
    "verifier_svc/policy/draft_policy.py",
    "verifier_svc/policy/draft_trees.py",
    "verifier_svc/policy/forward_cost.py",
    "verifier_svc/policy/goodput.py",
    "verifier_svc/policy/plan.py",
    "verifier_svc/policy/asks.py",
    "verifier_svc/policy/pause_reasons.py",
    "verifier_svc/policy/planner.py",
    "verifier_svc/policy/waits.py",
    "verifier_svc/verification/rule_choice.py",
    "verifier_svc/engine/scheduler.py",
    "verifier_svc/engine/step_shares.py",
    "verifier_svc/engine/tenant_use.py",
    "verifier_svc/state/sequence.py",
    "verifier_svc/state/step_clock.py",
    "verifier_svc/state/trie.py",
    "verifier_svc/verification/batch.py",
    "verifier_svc/engine/draft_wait.py",
]

_VENDOR = Path("gateway/web/vendor")
# SHA-256 of the files of uPlot 1.6.16.
_PLOTTING_LIBRARY = {
    "uPlot.iife.js": "655bc8aa33781e8721c5af6b59f1699c03c9bda951aa74a6ab518ac20cc4326d",
    "uPlot.min.css": "3f121cd4a997b634e07a887658850018e475c26f0bddd874109a8d382c19de87",
}


def _compiled_step() -> list[Extension]:
    """Return the extensions of the compiled step, for a wheel or `build_ext`; else none."""
    if "editable_wheel" in sys.argv or not {"bdist_wheel", "build_ext"} & set(sys.argv):
        return []
    from mypyc.build import mypycify

    # Imported packages may be missing during a build, so mypy skips them. `make lint` checks types.
    flags = ["--config-file=", "--ignore-missing-imports", "--follow-imports=skip"]
    try:
        extensions: list[Extension] = mypycify([*flags, *_STEP], opt_level="1", debug_level="0")
    except SystemExit:
        # Other versions of mypy may report errors that the version of `make lint` does not report.
        print("warning: not compiling the engine's step: mypy reports errors", file=sys.stderr)
        return []
    for extension in extensions:
        # The compiled step is optional like the kernels, and a compiler's warnings must not stop
        # the build.
        extension.optional = True
        extension.extra_compile_args.append("-Wno-error")
    return extensions


class _BuildExtensions(build_ext):
    """Compiles on every core, each extension in its own directory; removes a partly built step.

    The step's modules load one shared library, and without it none of them can be imported.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        # The kernels' extensions compile the same sources with other flags at the same time. In one
        # directory they would link each other's object files.
        own = copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(_BuildExtensions, own).build_extension(ext)

    def _machine(self) -> str:
        """Return what the compiler compiles for: another machine if CC is a cross compiler."""
        try:
            command = [*self.compiler.compiler_so, "-dumpmachine"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (AttributeError, OSError, subprocess.CalledProcessError):
            # A compiler that does not state its target compiles for this machine.
            return get_platform().partition("-")[2]

    def build_extensions(self) -> None:
        machine = self._machine()
        self.extensions = [one for one in self.extensions if _is_for(one, machine)]
        super().build_extensions()
        paths = [Path(self.get_ext_fullpath(extension.name)) for extension in _STEP_EXTENSIONS]
        if not all(path.exists() for path in paths):
            for path in paths:
                path.unlink(missing_ok=True)


def _commit() -> str:
    """Return the commit of these sources; empty if it is unknown.

    An archive of the sources has it in a file, a build may get it as OUTRIDER_COMMIT, and git
    knows it in a checkout.
    """
    told = Path("outrider/commit.txt")
    if told.exists():
        return told.read_text().strip()
    if commit := os.environ.get("OUTRIDER_COMMIT"):
        return commit
    if not Path(".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _write_commit(root: str) -> None:
    """Write the commit into a package that is being built, for `outrider --version`."""
    if commit := _commit():
        Path(root, "outrider/commit.txt").write_text(f"{commit}\n")


class _BuildPython(build_py):
    """Adds the commit, except to an editable package, which asks git."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            _write_commit(self.build_lib)


class _ArchiveSources(sdist):
    """Adds the commit to an archive of the sources."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _write_commit(base_dir)


def _fetch_plotting_library() -> None:
    """Copy the web page's plotting library from the package `uplot`, a build dependency.

    Raises SystemExit if a file's hash is not that of the tested file.
    """
    package = find_spec("uplot")
    if package is None or package.origin is None:
        return
    if not {"bdist_wheel", "editable_wheel"} & set(sys.argv):
        return
    for name, digest in _PLOTTING_LIBRARY.items():
        source = Path(package.origin).parent / "static" / name
        if hashlib.sha256(source.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{source} is not the file that the web page was tested with")
        _VENDOR.mkdir(exist_ok=True)
        shutil.copyfile(source, _VENDOR / name)


_STEP_EXTENSIONS = _compiled_step()
_fetch_plotting_library()
setup(
    ext_modules=[*_kernels(), *_STEP_EXTENSIONS],
    cmdclass={"build_ext": _BuildExtensions, "build_py": _BuildPython, "sdist": _ArchiveSources},
)
