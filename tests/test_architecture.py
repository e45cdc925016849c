"""The map of the code in docs/architecture.md against the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PARAGRAPHS = dict(re.findall(r"^### `(.+?)/`\n(.+?)(?=\n\n|\n*\Z)", PAGE, re.MULTILINE | re.DOTALL))


WALKS = {
    title: re.split(r"^\d+\. ", steps, flags=re.MULTILINE)[1:]
    for title, steps in re.findall(
        r"^### (.+?)\n(.+?)(?=\n##|\Z)",
        PAGE.partition("## Three walks")[2].partition("## Rooms")[0],
        re.MULTILINE | re.DOTALL,
    )
}
NOT_OURS = {"ProcessGroup.allreduce", "try"}


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


def test_a_walk_has_ten_steps() -> None:
    assert [len(steps) for steps in WALKS.values()] == [10, 10, 10]


@pytest.mark.parametrize("walk", WALKS)
def test_modules_of_a_walk_define_the_names_beside_them(walk: str) -> None:
    for step in WALKS[walk]:
        modules = re.findall(r"`([a-z_/]+\.py)`", step)
        defined = set().union(*(defined_in(path_of(module)) for module in modules))
        named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", step)) - set(modules) - NOT_OURS
        assert named <= defined, step


def path_of(module: str) -> Path:
    return ROOT / module if (ROOT / module).exists() else ROOT / "commtrace" / module


def defined_in(path: Path) -> set[str]:
    """Functions, classes, their methods as ``Class.method``, and constants of a module."""
    names = set[str]()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return names
