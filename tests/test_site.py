"""The documentation as a site: every link leads somewhere, and what is written by a program is up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.site import DOCS, ROOT, build_site
from tools.reference import command_page, json_page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


def test_all_pages_are_on_the_site(site: Path) -> None:
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}

    assert {path.parent.name for path in site.glob("*/index.html")} >= pages


def test_the_search_puts_questions_first_in_the_words_of_those_who_ask(site: Path) -> None:
    sections = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    first = {one["title"] for one in sections if one["location"].startswith("questions/") and one["boost"] > 1}

    assert first >= {"Why is my step slow?", "My job hangs", "Out of memory"}


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]*)|<link[^>]*\shref="(https?:[^"]*)""")

    assert {page.name: found for page in site.rglob("*.html") if (found := loaded.findall(page.read_text()))} == {}


def test_reference_pages_are_up_to_date() -> None:
    advice = "write them anew: make site"

    assert (DOCS / "cli.md").read_text() == command_page(), advice
    assert (DOCS / "json.md").read_text() == json_page(DOCS / "json"), advice


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = set(_pages(yaml.safe_load(text)["nav"]))

    assert pages == {path.name for path in DOCS.glob("*.md")}


def test_the_name_of_a_page_in_the_navigation_is_its_title() -> None:
    named = dict(_names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    titles = {page: re.findall(r"^# (.*)", (DOCS / page).read_text(), re.MULTILINE)[0] for page in named}

    assert named == titles


def _names(entries: object) -> Iterator[tuple[str, str]]:
    """Yield the file and the name of each page."""
    if isinstance(entries, list):
        for entry in entries:
            yield from _names(entry)
    elif isinstance(entries, dict):
        for name, inner in entries.items():
            yield from [(inner, name)] if isinstance(inner, str) else _names(inner)


def _pages(entries: object) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for inner in entries.values():
            yield from _pages(inner)
    elif isinstance(entries, list):
        for inner in entries:
            yield from _pages(inner)
