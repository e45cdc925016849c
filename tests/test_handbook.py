"""Each row of docs/handbook.md names what is there: commands, pages, and the tests that show it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from commtrace.cli.main import COMMANDS, load_command

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "handbook.md").read_text("utf-8")
REFERENCES = [
    "A1", "A1", "A2", "A3", "A6", "A8", "A10", "B1–B5", "C1", "C1", "C3", "C5", "C7", "D1–D3", "D7", "E1", "E4", "E5",
    "E9", "F-1", "F-4", "F-5", "F-7", "F9", "F10", "G1", "G2", "H2", "I1", "I3", "I4", "I5", "I6", "J1", "J2", "J3",
    "J6", "K1", "K4", "K5", "clocks",
]  # fmt: skip
"""What the book asks for: no row may get lost."""


class Row(NamedTuple):
    """A capability: what is asked, where commtrace has it, which tests show it, what they cannot."""

    name: str
    asks: str
    commtrace: str
    shown_by: str
    on_hardware: str

    @property
    def references(self) -> list[str]:
        """Return the numbers in front of the name: ``A3, C5 small messages`` has two."""
        return re.findall(r"(?:^|, )([A-K]-?\d+(?:–[A-K]\d+)?|clocks)", self.name)

    @property
    def tests(self) -> list[str]:
        """Return the tests as pytest takes them."""
        return re.findall(r"`(tests/[^`]+)`", self.shown_by)


def rows(page: str) -> list[Row]:
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| row ")
    ]
    return [Row(*row) for row in cells]


def faults(row: Row) -> list[str]:
    """Return what a row names and is not there, and what it leaves out."""
    lines = re.findall(r"`commtrace ([^`]+)`", " ".join(row))
    links = re.findall(r"\]\(([\w-]+\.md)", row.commtrace)
    found = [f"no command {line}" for line in lines if not can_be_given(line)]
    found += [f"no page {link}" for link in links if not (ROOT / "docs" / link).exists()]
    found += [f"no test {name}" for name in row.tests if name.partition("::")[2] not in functions(name)]
    if not (lines or links or "`make " in row.commtrace):
        found.append("neither a command nor a page")
    if not row.tests and row.on_hardware == "nothing":
        found.append("no test, and no hardware would help")
    return found


def can_be_given(line: str) -> bool:
    """Return whether there is this command, with all options that the line gives it."""
    words = line.split()
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        return False
    known = {option for parameter in load_command(name).params for option in parameter.opts}
    return {word for word in words if word.startswith("--")} <= known


@functools.cache
def functions(test: str) -> frozenset[str]:
    """Return the test functions of the module of ``tests/…::name``; none if there is no such module."""
    path = ROOT / test.partition("::")[0]
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))


def test_no_row_is_missing() -> None:
    named = [reference for row in rows(PAGE) for reference in row.references]

    assert sorted(named) == sorted(REFERENCES)


@pytest.mark.parametrize("row", rows(PAGE), ids=lambda row: row.name)
def test_commands_pages_and_tests_that_a_row_names_exist(row: Row) -> None:
    assert all(row)
    assert faults(row) == []


@pytest.mark.parametrize(
    ("commtrace", "shown_by", "on_hardware", "fault"),
    [
        ("`commtrace guess`", "`tests/test_handbook.py::test_no_row_is_missing`", "nothing", "no command guess"),
        (
            "[there](not-there.md)",
            "`tests/test_handbook.py::test_no_row_is_missing`",
            "nothing",
            "no page not-there.md",
        ),
        ("`make test`", "`tests/test_handbook.py::test_gone`", "nothing", "no test tests/test_handbook.py::test_gone"),
        ("`make test`", "`tests/gone.py::test_gone`", "nothing", "no test tests/gone.py::test_gone"),
        ("`make test`", "`tests/test_handbook.py`", "nothing", "no test tests/test_handbook.py"),
        ("somewhere", "`tests/test_handbook.py::test_no_row_is_missing`", "nothing", "neither a command nor a page"),
        ("`make test`", "–", "nothing", "no test, and no hardware would help"),
    ],
)
def test_names_that_do_not_exist_are_faults(commtrace: str, shown_by: str, on_hardware: str, fault: str) -> None:
    (row,) = rows(f"| A1 | asks | {commtrace} | {shown_by} | {on_hardware} |")

    assert faults(row) == [fault]
