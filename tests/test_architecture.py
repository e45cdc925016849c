"""The map of the code in docs/architecture.md against the tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PARAGRAPHS = dict(re.findall(r"^### `(.+?)/`\n(.+?)(?=\n\n|\n*\Z)", PAGE, re.MULTILINE | re.DOTALL))


def folder_of(room: str) -> Path:
    return ROOT / "commtrace" if room == "commtrace" else ROOT / "commtrace" / room


def test_every_room_has_a_paragraph_and_every_paragraph_a_room() -> None:
    tops = [ROOT / "commtrace", *(ROOT / name for name in ("integrations", "exporters", "viewer"))]
    rooms = {path.parent.relative_to(ROOT) for top in tops for path in top.rglob("*.py")}
    named = {str(room).removeprefix("commtrace/") for room in rooms}
    assert set(PARAGRAPHS) == named


def test_modules_that_paragraphs_name_are_in_their_rooms() -> None:
    for room, paragraph in PARAGRAPHS.items():
        for name in re.findall(r"`([a-z_]+)`", paragraph):
            if name != "sitecustomize":
                assert (folder_of(room) / f"{name}.py").exists() or name == "commtrace", f"{room}: {name}"


def test_modules_that_answer_the_questions_exist() -> None:
    modules = re.findall(r"`([a-z_/]+\.py)`", PAGE.partition("## Rooms")[0])
    assert len(modules) >= 10
    for name in modules:
        assert (ROOT / name).exists() or (ROOT / "commtrace" / name).exists(), name
