"""Users' prompts are read in the formats that data sets have on disk; errors name the row."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.experiment.spec import Workload, load
from outrider_bench.experiment.traffic import Encoder, requests_of, warm_up_of
from outrider_bench.prompt_files import Prompt, read

ASKED = "Who lives in Oslo?"
ROWS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": [ASKED, "Why?"]},
        "writing",
        True,
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": ASKED, "entry_point": "f", "test": "assert f()"},
        "data",
        False,
    ),
    "gsm8k": ({"question": ASKED, "answer": "#### 3"}, "data", True),
    "sharegpt": (
        {
            "id": "x",
            "conversations": [
                {"from": "system", "value": "Be short."},
                {"from": "human", "value": ASKED},
                {"from": "gpt", "value": "Ada."},
            ],
        },
        "data",
        True,
    ),
    "prompts": ({"prompt": ASKED}, "data", False),
    "messages": (
        {"category": "chat", "messages": [{"role": "user", "content": ASKED}]},
        "chat",
        True,
    ),
}
"""Maps a format to a row, the row's kind in a file named `data`, and whether the row is a chat."""


def _only(path: Path) -> Prompt:
    [[prompt]] = read(path).values()
    return prompt


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("whole", [False, True], ids=["lines", "array"])
def test_the_keys_of_the_first_row_tell_the_format(form: str, whole: bool, tmp_path: Path) -> None:
    row, kind, is_chat = ROWS[form]
    path = tmp_path / ("data.json" if whole else "data.jsonl")
    path.write_text(json.dumps([row], indent=1) if whole else json.dumps(row) + "\n\n")
    prompt = _only(path)
    assert prompt.kind == kind
    assert prompt.text == ("" if is_chat else ASKED)
    assert [message.content for message in prompt.chat] == ([ASKED] if is_chat else [])


def test_lines_of_text_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("[1] first\n\n  second\r\n")
    assert [prompt.text for prompt in read(path)["mine"]] == ["[1] first", "  second"]


def test_a_conversation_without_a_question_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    silent = {"conversations": [{"from": "gpt", "value": "Hello."}]}
    path.write_text(json.dumps([silent, {"conversations": []}, ROWS["sharegpt"][0]]))
    assert len(read(path)["share"]) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"turns": ["x"]}\n{"turns": []}', r"line 2: turns: List should have at least"),
        ("a.jsonl", '{"question": 7}', r"line 1: question: Input should be a valid string"),
        ("a.jsonl", '{"question": "x"}\n{"prompt": "x"}', r"line 2: question: is missing"),
        ("a.jsonl", '{"prompt": "x"}\n{"turn', r"line 2: is not JSON"),
        (
            "a.jsonl",
            '{"text": "x"}',
            r"line 1: must have one of .*, and has text",
        ),
        ("a.jsonl", '"x"', r"line 1: must have one of .*, and has no object"),
        ("a.json", '[{"conversations": [{"value": "x"}]}]', r"row 1: conversations\.0\.from"),
        ("a.json", "[{", r"the array: is not JSON"),
        ("a.txt", "\n", r"must have at least one prompt"),
    ],
)
def test_a_wrong_row_is_named_by_file_line_and_field(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")


def _spec_bench(path: Path) -> Path:
    rows = [
        {"category": category, "turns": [f"{category} {number}"]}
        for category in ("math", "schema")
        for number in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_categories_are_asked_in_turn_and_their_last_prompt_is_kept(tmp_path: Path) -> None:
    encoder = Encoder(Path("models/target"))
    path = _spec_bench(tmp_path / "spec.jsonl")
    workload = Workload.model_validate({"prompts": path, "waves": 8})
    requests = requests_of(workload, encoder)
    assert [request.kind for request in requests[:4]] == ["math", "schema", "math", "schema"]
    kept = {tuple(request.prompt) for request in warm_up_of(workload, encoder)}
    assert len(kept) == 2
    assert not kept & {tuple(request.prompt) for request in requests}
    # A category that has the name of one of Outrider's kinds does not get that kind's grammar.
    assert all(request.grammar is None for request in requests)
    only = workload.model_copy(update={"kinds": ["schema"]})
    assert {request.kind for request in requests_of(only, encoder)} == {"schema"}


def test_the_grammar_of_a_row_is_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    grammars = [{"json": {"type": "integer"}}, {"choice": ["yes", "no"]}, None]
    rows = [{"prompt": ASKED, "structured_outputs": grammar} for grammar in grammars]
    path.write_text("\n".join(map(json.dumps, rows)))
    encoder = Encoder(Path("models/target"))
    workload = Workload.model_validate({"prompts": path, "waves": 8})
    requests = requests_of(workload, encoder)
    assert [request.grammar for request in requests] == grammars[:2] * 4
    assert warm_up_of(workload, encoder)[0].grammar is None


def test_chats_are_rendered_by_the_targets_template(tmp_path: Path) -> None:
    encoder = Encoder(Path("models/target"))
    chat = Prompt.model_validate({"kind": "x", "chat": [{"role": "user", "content": "Hi"}]})
    by_hand = Prompt(kind="x", text="<|user|>Hi<|end|><|assistant|>")
    assert encoder.ids(chat) == encoder.ids(by_hand)


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(Path("models/target/tokenizer.json").read_bytes())
    chat = Prompt.model_validate({"kind": "x", "chat": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(ValueError, match=r"kind x: .*the model has no chat template"):
        Encoder(tmp_path).ids(chat)


def test_an_experiment_file_names_the_line_of_its_prompts(tmp_path: Path) -> None:
    path = tmp_path / "spec.jsonl"
    path.write_text('{"turns": 3}')
    file = tmp_path / "experiment.yaml"
    file.write_text(f"name: own\nworkload: {{prompts: {path}}}\n")
    with pytest.raises(ValueError, match=r"experiment\.yaml: .*spec\.jsonl: line 1: turns: Input"):
        load(file)
    _spec_bench(path)
    read.cache_clear()
    assert load(file).workload.prompts == path
    file.write_text(f"name: own\nworkload: {{prompts: {path}, kinds: [law]}}\n")
    with pytest.raises(ValueError, match="kinds must be of math, schema, not 'law'"):
        load(file)
