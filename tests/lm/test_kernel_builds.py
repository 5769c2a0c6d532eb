"""Each library of kernels runs on its kind of processor, whatever else was compiled."""

import platform
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import torch

from outrider.errors import OutriderError
from outrider.lm.cpu import library
from outrider.lm.cpu.library import (
    AT_HWCAP,
    AT_HWCAP2,
    HWCAP2_BF16,
    HWCAP2_I8MM,
    HWCAP_ASIMDDP,
    SETTING,
    load_build,
    runnable_builds,
)

# Maps a library to registers and instructions in its code that earlier processors lack.
MARKS = {
    "_cpu": set[str](),
    "_cpu_avx2": {"ymm", "vfmadd"},
    "_cpu_avx512": {"ymm", "vfmadd", "zmm"},
    "_cpu_avx512_bf16": {"ymm", "vfmadd", "zmm", "vdpbf16ps", "vpdpbusd"},
    "_cpu_amx": {"ymm", "vfmadd", "zmm", "vdpbf16ps", "vpdpbusd", "tdpbf16ps", "tdpbsud"},
}
ALL_MARKS = MARKS["_cpu_amx"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="test_arm_kernels.py has ARM's builds")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is missing: binutils")
@pytest.mark.parametrize("name", MARKS)
def test_a_library_has_the_instructions_of_its_kind_of_processor(name: str) -> None:
    found = load_build(name)
    assert found is not None, "tests need a C compiler when the package is installed"
    command = ["objdump", "--disassemble", found._name]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {mark for mark in ALL_MARKS if mark in code} == MARKS[name]


def test_no_library_of_other_sources_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "LAYOUT", library.LAYOUT + 1)
    assert load_build(runnable_builds()[0]) is None
    assert "is of another version: install Outrider again" in caplog.text


def test_the_best_library_for_this_processor_was_built() -> None:
    assert load_build(runnable_builds()[0]) is not None


@pytest.mark.parametrize(
    ("machine", "bits", "newer_bits", "builds"),
    [
        ("aarch64", 0, 0, ["_cpu"]),
        ("aarch64", ~HWCAP_ASIMDDP, ~HWCAP2_BF16, ["_cpu"]),
        ("aarch64", HWCAP_ASIMDDP, HWCAP2_BF16, ["_cpu_arm_dot", "_cpu"]),
        ("aarch64", HWCAP_ASIMDDP, HWCAP2_I8MM, ["_cpu_arm_dot", "_cpu"]),
        ("aarch64", 0, HWCAP2_BF16 | HWCAP2_I8MM, ["_cpu_arm_bf16", "_cpu"]),
        ("aarch64", -1, -1, ["_cpu_arm_bf16", "_cpu_arm_dot", "_cpu"]),
        # On RISC-V the same bits have other meanings.
        ("riscv64", -1, -1, ["_cpu"]),
    ],
)
def test_an_arm_processor_runs_what_linux_says_it_can(
    machine: str,
    bits: int,
    newer_bits: int,
    builds: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert library._auxiliary(AT_HWCAP) >= 0
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    monkeypatch.setattr(library, "_can", lambda question: False)
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    read = {AT_HWCAP: bits, AT_HWCAP2: newer_bits}
    monkeypatch.setattr(library, "_auxiliary", lambda entry: read[entry])
    assert runnable_builds() == builds


@pytest.fixture
def fresh_library() -> Iterator[None]:
    library.library.cache_clear()
    yield
    library.library.cache_clear()


@pytest.mark.usefixtures("fresh_library")
def test_a_setting_takes_the_library_of_a_lesser_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "default")
    lesser, least = library.library(), load_build("_cpu")
    assert lesser is not None
    assert least is not None
    assert lesser._name == least._name


@pytest.mark.usefixtures("fresh_library")
def test_kernels_that_this_processor_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "runnable_builds", lambda: ["_cpu_avx2", "_cpu"])
    monkeypatch.setenv(SETTING, "avx512")
    message = f"^{SETTING} is 'avx512', but this processor can run only: avx2, default$"
    with pytest.raises(OutriderError, match=message):
        library.library()
