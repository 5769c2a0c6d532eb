"""Images for linux/arm64, built by compose/Dockerfile, run, and draft for a verifier on x86."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arm import arm
from tests.stack import Client, Process, Stack

pytestmark = arm.MARKS
_NAME = "outrider-arm-image"


def _missing() -> str:
    """Return what the tests need and this machine lacks; empty if it lacks nothing."""
    for tool in ("qemu-aarch64-static", "debootstrap", "docker"):
        if shutil.which(tool) is None:
            return tool
    if os.geteuid() != 0:
        return "root"
    asked = subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False)
    return "a running Docker" if asked.returncode else ""


@pytest.fixture(scope="module")
def built(wheel: Path) -> str:
    """Build the images; return what the build says about them."""
    if missing := _missing():
        pytest.skip(f"this needs {missing}")
    command = [str(arm.HERE / "build-images.sh"), str(wheel.parent)]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return done.stdout


@pytest.mark.parametrize("image", ["gateway", "drafter-ngram"])
def test_an_image_is_for_arm_and_its_programs_run(image: str, built: str) -> None:
    assert f"outrider-{image}:arm64: linux/arm64, " in built
    [machine] = [line for line in built.splitlines() if line.startswith(f"{image} runs on ")]
    assert machine.startswith(f"{image} runs on aarch64: outrider ")


@pytest.mark.usefixtures("built")
async def test_a_drafters_image_drafts_for_a_verifier_on_x86() -> None:
    run = ["docker", "run", "--rm", "--name", _NAME, "--network", "host"]
    command = [*run, "--platform", "linux/arm64", "outrider-drafter-ngram:arm64"]
    stack = Stack("--always-draft")
    # Another process may have the image's port for metrics.
    flags = ["--verifier", stack.address, "--id", "arm-image", "--metrics-port", "0"]
    try:
        drafter = Process("", *flags, "--listen", "127.0.0.1:0", command=command)
        stack.drafters["arm-image"] = drafter
        [listed] = (await asyncio.to_thread(stack.wait_ready)).drafters
        assert listed.placement.architecture == "aarch64"
        async with Client(stack.address) as client:
            for label, sampling in arm.SAMPLINGS.items():
                sums = await arm.equal_texts(client, sampling)
                drafts = f"{sums.accepted_token_count} of {sums.draft_token_count}"
                print(f"{label}: {len(sums.texts)} equal texts, {drafts} drafts accepted")
                assert sums.accepted_token_count > 0
    finally:
        # The emulated drafter may need longer for its end than `stop` waits.
        command = ["docker", "rm", "--force", _NAME]
        await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
        stack.stop()
