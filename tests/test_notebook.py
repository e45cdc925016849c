"""The notebook in examples/ runs from top to bottom, and shows what its text says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "reading.ipynb"


def _cells() -> list[str]:
    return [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]


def _shown(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression, which a notebook shows."""
    tree = ast.parse(cell)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def test_the_notebook_is_valid_and_has_no_outputs() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)

    assert [cell.outputs for cell in book.cells if cell.cell_type == "code"] == [[]] * len(_cells())


def test_the_notebook_runs_and_names_the_slow_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [_shown(cell, names) for cell in _cells()]

    assert repr(shown[0]) == "<commtrace.RecordedRun 'simulated-run': 8 of 8 ranks>"
    means = shown[2]
    assert means.compute_ns.idxmax() == 5
    assert (means.drop(columns="wall_ns").sum(axis=1) - means.wall_ns).abs().max() < 0.4, "rounded, but for rare states"
    [verdict] = [one for one in names["findings"] if one.kind == "slow"]
    assert (verdict.rank, verdict.cause) == (5, "compute")
    assert names["pipeline"].schedule == "1f1b"
    forwards = shown[-2]
    assert forwards["50%"].idxmax() == 5
    assert forwards["count"].tolist() == [96.0] * 8
    assert shown[-1] == ("shared clock", {"p50": 0, "p99": 0, "max": 0}, None)
