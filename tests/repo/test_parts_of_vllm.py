"""The table of vLLM's parts has all that our code imports, and its reader finds what moved."""

import ast
import re
from pathlib import Path

from tests.vllm.parts import ASKED, PARTS, RUNNER, moved

ROOT = Path(__file__).parents[2]


def imported() -> set[tuple[str, str]]:
    """Return pairs of a module of vLLM and a name that our code imports from it."""
    files = (ROOT / "verifier_svc/vllm").glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return {
        (node.module or "", each.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for each in node.names
    }


def test_the_table_has_every_name_that_our_code_imports() -> None:
    found = imported()
    assert len(found) > 15
    for module, name in found:
        folder = f"{module}/".replace(".", "/").removeprefix("vllm/")
        # The name may be a module.
        if {f"{folder}{name}.py", f"{folder}{name}/__init__.py"} & PARTS.keys():
            continue
        files = (f"{folder[:-1]}.py", f"{folder}__init__.py")
        [classes] = [PARTS[file] for file in files if file in PARTS]
        words = re.findall(r"\w+", classes.get("", ""))
        assert name in (*words, *classes), f"tests/vllm/parts.py lacks {module}.{name}"


def made(folder: Path) -> None:
    """Write sources that have all parts."""
    for file, classes in PARTS.items():
        lines = []
        for owner, names in classes.items():
            indent = "    " if owner else ""
            lines += [f"class {owner}:", "    pass"] if owner else []
            own = "self, " if owner else ""
            for part in names.replace(", ", ",").split():
                name, _, given = part.partition("(")
                given = given.rstrip(")").replace(",", ", ")
                lines.append(
                    f"{indent}def {name}({own}{given}): pass" if given else f"{indent}{name} = 1"
                )
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
    runner = folder / RUNNER
    runner.write_text(runner.read_text() + "".join(f"\n# self.speculator.{each}" for each in ASKED))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_each_change_of_a_part_is_named(tmp_path: Path) -> None:
    made(tmp_path)
    assert list(moved(tmp_path)) == []
    change(tmp_path / "v1/request.py", "spec_token_ids", "draft_token_ids")
    change(tmp_path / "exceptions.py", "VLLMClientError", "ClientError")
    change(tmp_path / "v1/worker/worker_base.py", "class WorkerWrapperBase", "class Wrapper")
    scheduler = tmp_path / "v1/core/sched/scheduler.py"
    change(scheduler, "(self, draft_token_ids)", "(self, draft_token_ids, more)")
    (tmp_path / "v1/outputs.py").unlink()
    with (tmp_path / RUNNER).open("a") as runner:
        runner.write("\n# self.speculator.rewind()")
    found = "\n".join(moved(tmp_path))
    for line in (
        "v1/request.py: Request.spec_token_ids is missing",
        "exceptions.py: VLLMClientError is missing",
        "v1/worker/worker_base.py: WorkerWrapperBase is missing, with its init_device",
        "Scheduler.update_draft_token_ids takes (draft_token_ids, more), not (draft_token_ids)",
        "v1/outputs.py: the file is missing, with DraftTokenIds.req_ids",
        "the runner asks its drafter for rewind",
    ):
        assert line in found
