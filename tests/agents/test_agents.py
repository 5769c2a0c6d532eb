"""Released clients work in their default mode, as users run them. install.sh installs them.

Each script of clients/ asks the bundled pair for answers of a demanded type, and a scripted model
for calls that this model chooses by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.agents.scripted_model import ANSWER, RESULT
from tests.gateway.gateway_rig import Rig

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / "build/agents"
# Some libraries take half a minute to import on a busy machine.
LIMIT_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

NODE = ("sdks-node", "npm", "tools")
# Environment, script and its argument. CI installs only the two environments of SDKs. The other
# clients have HTTP clients of their own; people run them before a release (`make agents`).
CLIENTS = [
    ("sdks", "openai_python", ""),
    ("sdks", "openai_responses", ""),
    ("sdks", "anthropic_python", ""),
    ("sdks", "openai_agents_chat", ""),
    ("sdks", "openai_agents_responses", ""),
    ("current", "litellm_tools", ""),
    ("current", "litellm_responses", ""),
    ("sdks-node", "openai_node", ""),
    ("sdks-node", "openai_node_responses", ""),
    ("sdks-node", "anthropic_node", ""),
    ("npm", "openai_agents_node", "chat"),
    ("npm", "openai_agents_node", "responses"),
    ("npm", "ai_sdk", "compatible"),
    ("npm", "ai_sdk", "chat"),
    ("npm", "ai_sdk", "responses"),
    ("npm", "ai_sdk", "messages"),
]


def program(environment: str, name: str) -> str:
    """Return the path of a program in an environment.

    Skips the test if the program is not installed.
    """
    if not (INSTALLED / environment / "installed").exists():
        pytest.skip("runs by hand, before a release: make agents installs the client")
    folder = "node_modules/.bin" if environment in NODE else "bin"
    return str(INSTALLED / environment / folder / name)


async def run(*command: str, cwd: Path = HERE, **variables: str) -> tuple[int, str]:
    """Run a program; return its exit status and its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", "PWD": str(cwd), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


@pytest.mark.parametrize(
    ("environment", "script", "argument"),
    CLIENTS,
    ids=["-".join(filter(None, (script, argument))) for _, script, argument in CLIENTS],
)
async def test_a_client_gets_what_it_asks_for(
    environment: str, script: str, argument: str, real: str, scripted: Rig
) -> None:
    is_node = environment in NODE
    interpreter = program(environment, "node" if is_node else "python")
    path = HERE / "clients" / f"{script}.{'mjs' if is_node else 'py'}"
    if is_node:
        path = linked(path, environment)
    status, output = await run(interpreter, str(path), real, scripted.gateway.http_url, argument)
    assert status == 0, output


def linked(script: Path, environment: str) -> Path:
    """Return a copy of the script near the packages: Node.js looks for packages near a script."""
    folder = INSTALLED / environment / "clients"
    folder.mkdir(exist_ok=True)
    for source in HERE.glob("clients/*.mjs"):
        (folder / source.name).write_text(source.read_text())
    return folder / script.name


# `TOOLS` maps a program to its configuration, to the path of this configuration, and to its
# arguments without the question.
CODEX = """
model = "outrider"
model_provider = "outrider"
[model_providers.outrider]
name = "Outrider"
base_url = "ADDRESS/v1"
wire_api = "responses"
"""
OPENCODE = """{
  "model": "outrider/outrider",
  "provider": {
    "outrider": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "ADDRESS/v1", "apiKey": "any"},
      "models": {"outrider": {}}
    }
  }
}"""
CONTINUE = """
name: local
version: 1.0.0
schema: v1
models:
  - name: outrider
    provider: openai
    model: outrider
    apiBase: ADDRESS/v1
    apiKey: any
    roles: [chat]
    capabilities: [tool_use]
"""
TOOLS = {
    "codex": (CODEX, ".codex/config.toml", "exec --skip-git-repo-check"),
    "opencode": (OPENCODE, "opencode.json", "run"),
    "cn": (CONTINUE, "config.yaml", "--config config.yaml --auto -p"),
}


@pytest.mark.parametrize("name", TOOLS)
async def test_a_command_line_reads_a_file_by_a_tool(
    name: str, scripted: Rig, tmp_path: Path
) -> None:
    text, place, words = TOOLS[name]
    config = tmp_path / place
    config.parent.mkdir(exist_ok=True)
    config.write_text(text.replace("ADDRESS", scripted.gateway.http_url))
    (tmp_path / "notes.txt").write_text(f"It is {RESULT}.")
    scripted.script.requests.clear()
    status, output = await run(
        *(program("tools", name), *words.split(), "What do my notes say of the weather?"),
        cwd=tmp_path,
        # This folder has a Node.js from npm's packages, since the system's may be too old.
        PATH=f"{INSTALLED}/npm/node_modules/.bin:{os.environ['PATH']}",
        HOME=str(tmp_path),
        CODEX_HOME=str(tmp_path / ".codex"),
        XDG_DATA_HOME=str(tmp_path / ".local"),
    )
    assert status == 0, output
    assert ANSWER in output
    prompts = [scripted.prompts.decode(request.prompt) for request in scripted.script.requests]
    assert any(RESULT in prompt for prompt in prompts), output


async def probe(url: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Run `canitoolcall probe`; return its output, and the scenarios that fail."""
    _, output = await run(
        *(program("current", "canitoolcall"), "probe", "--base-url", f"{url}/v1"),
        *("--model", "outrider", "--timeout", "120", "--json", "-"),
    )
    # The table comes before or after the report.
    report, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    outcomes = report["outcomes"]
    assert len(outcomes) == 27, output
    return output, [
        (outcome["scenario_id"], outcome["check"], outcome["status"])
        for outcome in outcomes
        if outcome["status"] != "pass"
    ]


async def test_a_probe_of_tool_calls_finds_nothing_wrong(scripted: Rig) -> None:
    output, failed = await probe(scripted.gateway.http_url)
    assert not failed, output


# The bundled model calls no tool by itself.
UNCALLED = {
    "single-call",
    "parallel-calls",
    "nested-args",
    "unicode-args",
    "empty-args",
    "reasoning-then-call",
}


async def test_a_probe_of_the_bundled_model_misses_only_its_own_calls(real: str) -> None:
    output, failed = await probe(real)
    assert set(failed) == {(scenario, "scenario", "fail") for scenario in UNCALLED}, output


async def test_langchains_tests_pass_but_for_those_that_need_a_larger_model(real: str) -> None:
    status, output = await run(
        *(program("current", "python"), "-m", "pytest", "-q", "-rfEX", "--tb=short"),
        *("-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", "--rootdir", "clients"),
        # The model's client keeps its connections, and they work in one event loop only.
        *("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),
        "clients/langchain_suite.py",
        OUTRIDER_URL=f"{real}/v1",
    )
    assert status == 0, output
