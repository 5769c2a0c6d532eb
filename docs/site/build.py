"""Builds the documentation as a site; `make site` calls this. Usage: build.py FOLDER

The pages are the Markdown files of the checkout, which also read well as they are. A copy of them
gets every file that a page links, and two pages that are made from the code: all settings, and the
reference of the drafter library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from drafter_svc.config import DrafterSettings
from drafter_svc.families.settings import (
    GrammarSettings,
    HeadSettings,
    ModelSettings,
    NgramSettings,
    SuffixSettings,
)
from gateway.config import GatewaySettings
from outrider import __version__
from outrider_cli.serve_settings import ServeSettings
from verifier_svc.config import VerifierSettings

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent
# Pages that are read in the sources only.
_LEFT_OUT = ("models/target", "models/draft", "tests/", ".github/")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|(?:src|href)=\"([^\"#]+)")
_REFERENCE = """# The drafter library

[drafters.md](drafters.md) shows how to write a drafter. This page is made from the code.

::: outrider.drafter.serve.serve

::: outrider.drafter
"""
_PROCESSES: dict[str, type[BaseModel]] = {
    "outrider serve": ServeSettings,
    "outrider gateway": GatewaySettings,
    "outrider verifier": VerifierSettings,
    "outrider drafter": DrafterSettings,
}
_FAMILIES: dict[str, type[BaseModel]] = {
    "ngram": NgramSettings,
    "suffix": SuffixSettings,
    "grammar": GrammarSettings,
    "model": ModelSettings,
    "head": HeadSettings,
}


def main() -> None:
    """Write the site of this version into a folder, and a page that leads there."""
    into = Path(sys.argv[1]).resolve()
    shutil.rmtree(into, ignore_errors=True)
    copy_pages(into / "pages")
    render(into / "pages", into / __version__)
    leads = f'<meta http-equiv="refresh" content="0; url={__version__}/index.html">'
    (into / "index.html").write_text(f"<!doctype html><title>Outrider</title>{leads}\n")


def render(pages: Path, site: Path) -> None:
    """Make the site from its pages; exit with the warnings if a link leads nowhere."""
    environment = {
        **os.environ,
        "OUTRIDER_PAGES": str(pages),
        "OUTRIDER_SITE": str(site),
        "OUTRIDER_NAME": f"Outrider {__version__}",
        "OUTRIDER_SOURCES": str(ROOT),
        # The theme warns of a later version of its generator.
        "NO_MKDOCS_2_WARNING": "1",
    }
    # With --quiet, --strict would not see a warning.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml")]
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if built.returncode:
        raise SystemExit(built.stderr + built.stdout)


def copy_pages(pages: Path) -> None:
    """Copy the tracked pages and the files that they link, and add the pages made from the code.

    A linked folder without a page gets one.
    """
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        if not name.startswith(_LEFT_OUT):
            _copy(ROOT / name, pages)
    for page in list(pages.rglob("*.md")):
        source = ROOT / page.relative_to(pages)
        text = source.read_text()
        for target in _links(text):
            found = Path(os.path.normpath(source.parent / target))
            if found.is_dir():
                page_of = _page_of_folder(found, pages)
                text = text.replace(f"]({target})", f"]({target.rstrip('/')}/{page_of})")
            elif found.is_file():
                _copy(found, pages)
        page.write_text(text)
    (pages / "docs/settings.md").write_text(settings_page())
    (pages / "docs/reference.md").write_text(_REFERENCE)


def _links(text: str) -> Iterator[str]:
    """Yield the relative targets of a page's links, without those in code."""
    for match in _LINK.finditer(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        target = match[1] or match[2]
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def _copy(source: Path, pages: Path) -> None:
    copied = pages / source.relative_to(ROOT)
    if copied.exists():
        return
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, copied)


def _page_of_folder(folder: Path, pages: Path) -> str:
    """Return the name of a folder's page; write a list of the files if the folder has no page."""
    if (folder / "README.md").exists():
        return "README.md"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        _copy(path, pages)
    lines = "\n".join(f"- [{path.name}]({path.name})" for path in files)
    name = folder.relative_to(ROOT)
    (pages / name).mkdir(parents=True, exist_ok=True)
    (pages / name / "index.md").write_text(f"# {name}\n\n{lines}\n")
    return "index.md"


def settings_page() -> str:
    """Return the page of all settings, by process and by family of drafters."""
    parts = [
        "# Settings\n\nEach process reads a setting from its flag, from the environment, and from"
        " a YAML file, in this order ([how](operations.md#settings)). This page is made from the"
        " code.\n"
    ]
    for command, schema in _PROCESSES.items():
        prefix = str(schema.model_config.get("env_prefix", ""))
        parts.append(f"## {command}\n")
        if prefix:
            parts.append(f"Variables of the environment begin with `{prefix.upper()}`.\n")
        parts.append(_table(schema))
    for family, schema in _FAMILIES.items():
        parts.append(f"## Drafters of the family {family}\n")
        parts.append(_table(schema))
    return "\n".join(parts)


def _table(schema: type[BaseModel]) -> str:
    rows = ["| flag | values | default | what it does |", "| --- | --- | --- | --- |"]
    for name, field in schema.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "required" if field.is_required() else f"`{default!r}`".replace("`None`", "–")
        meaning = " ".join((field.description or "").split())
        cells = (f"`--{name.replace('_', '-')}`", _values(field.annotation), shown, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _values(annotation: Any) -> str:
    """Return a type as a user sees it."""
    if arguments := get_args(annotation):
        return ", ".join(
            dict.fromkeys(_values(each) for each in arguments if each is not type(None))
        )
    if isinstance(annotation, str):
        return f"`{annotation}`"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "yes or no"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name.lower())


if __name__ == "__main__":
    main()
