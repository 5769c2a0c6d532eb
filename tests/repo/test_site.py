"""The documentation builds as a site, whose links lead somewhere and which needs no other host."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from outrider import drafter

BUILD = Path(__file__).parents[2] / "docs/site/build.py"
# Addresses that a browser loads without a click.
_LOADED = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="?(https?:[^"\s>]+)""")
_STYLE = re.compile(r"""<link[^>]*rel="stylesheet"[^>]*href="?(https?:[^"\s>]+)""")


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    return runpy.run_path(str(BUILD))


@pytest.fixture(scope="module")
def pages(build: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    build["copy_pages"](folder)
    return folder


@pytest.fixture(scope="module")
def site(build: dict[str, Any], pages: Path) -> Path:
    made = pages.parent / "site"
    build["render"](pages, made)
    return made


def test_every_page_is_in_the_search(site: Path, pages: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    names = {str(path.relative_to(pages)) for path in (pages / "docs").glob("*.md")}
    assert {name.removesuffix(".md") + ".html" for name in names} <= found


def test_the_settings_of_all_processes_are_on_one_page(site: Path) -> None:
    page = (site / "docs/settings.html").read_text()
    for flag in ("--target", "--grpc-listen", "--draft-tokens", "--family", "--pool-ttl-seconds"):
        assert f"<code>{flag}</code>" in page


def test_the_reference_has_what_the_drafter_library_exports(site: Path) -> None:
    page = (site / "docs/reference.html").read_text()
    # The function `serve` is in a module of the same name.
    found = set(re.findall(r'id="outrider\.drafter(?:\.serve)?\.(\w+)"', page))
    assert set(drafter.__all__) - found == set()


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    loaded = {
        (str(page.relative_to(site)), url)
        for page in site.rglob("*.html")
        for pattern in (_LOADED, _STYLE)
        for url in pattern.findall(page.read_text())
    }
    assert loaded == set()


@pytest.mark.parametrize("link", ["nowhere.md", "operations.md#nowhere"])
def test_a_link_that_leads_nowhere_ends_the_build(
    build: dict[str, Any], pages: Path, tmp_path: Path, link: str
) -> None:
    page = pages / "docs/limits.md"
    text = page.read_text()
    page.write_text(f"{text}\n[planted]({link})\n")
    try:
        with pytest.raises(SystemExit, match="nowhere"):
            build["render"](pages, tmp_path / "site")
    finally:
        page.write_text(text)
