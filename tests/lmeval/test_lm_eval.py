"""lm-evaluation-harness gets equal figures of SmolLM2 with and without drafts, on a local task."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.smollm2_texts import smollm2
from tests.stack import ROOT, GatewayProcess, Stack, running

LM_EVAL = ROOT / "build/lm-eval/bin/lm_eval"
QUESTIONS = Path(__file__).with_name("questions.jsonl")
SPECULATION: dict[str, dict[str, bool]] = {
    "plain": {"enabled": False},
    "drafted": {"always_draft": True},
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LM_EVAL.exists(), reason="lm-eval is missing; run: make lm-eval"),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """Yield a gateway to SmolLM2 in float32, with n-grams and a model of another vocabulary."""
    file = smollm2()
    stack = Stack("--max-sequences", "8", target=file)
    stack.add_drafter("ngram", "ngram")
    draft = str(ROOT / "models/draft-2048")
    stack.add_drafter("model", "model", "--model", draft, "--target", file)
    with running(stack):
        found = GatewayProcess(stack.address, tokenizer=file)
        try:
            found.wait_ready()
            yield found
        finally:
            found.close()


def write_tasks(folder: Path) -> list[str]:
    """Write a task of scored choices, and a task of texts for each decoding mode; return names."""
    shared: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(QUESTIONS)}},
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
    }
    choice = {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    tasks: dict[str, dict[str, Any]] = {"choice": choice}
    for way, speculation in SPECULATION.items():
        tasks[way] = {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": {
                "until": ["Question:"],
                "max_gen_toks": 32,
                "temperature": 0,
                "speculation": speculation,
            },
            "metric_list": [{"metric": "chrf"}],
        }
    for name, task in tasks.items():
        # JSON is valid YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(shared | task | {"task": name}))
    return list(tasks)


def test_the_figures_and_texts_are_the_same_plain_and_drafted(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    names = write_tasks(tmp_path)
    served = httpx.get(f"{gateway.url}/v1/models").json()["data"][0]["id"]
    model = ",".join(
        [
            f"base_url={gateway.url}/v1/completions",
            f"model={served}",
            "tokenizer_backend=remote",
            "num_concurrent=4",
            "max_length=2048",
        ]
    )
    command = [str(LM_EVAL), "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", *names, "--include_path", str(tmp_path)]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [path] = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    print(json.dumps(results))
    # SmolLM2 knows most of the answers.
    assert results["choice"]["acc,none"] > 0.6

    def texts(way: str) -> list[Any]:
        [samples] = (tmp_path / "out").rglob(f"samples_{way}_*.jsonl")
        return [json.loads(line)["resps"] for line in samples.read_text().splitlines()]

    # Standard errors are not compared: lm-eval estimates them from random samples.
    assert results["plain"]["chrf,none"] == results["drafted"]["chrf,none"] > 0
    assert texts("plain") == texts("drafted")
    assert len({str(text) for text in texts("plain")}) > 6
