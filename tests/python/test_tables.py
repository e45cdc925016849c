"""The columns of tables: declared once, and documented as they are declared."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from commtrace.analysis.breakdown.states import FIXED, states_of
from commtrace.analysis.pipeline.bubble import StageBubble
from commtrace.analysis.stragglers.verdict import NamedRank, Verdict
from commtrace.python import tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def _type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return "string"
    return "list of int32" if pa.types.is_list(kind) else {"double": "float64"}.get(str(kind), str(kind))


@pytest.mark.parametrize("name", ["spans", "steps", "partition", "ranks", "communication", "stages", "stragglers"])
def test_the_documentation_has_the_columns_that_are_declared(name: str) -> None:
    [section] = re.findall(rf"^### {name}\n(.*?)(?=^#|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    documented = [line for line in section.splitlines() if line.startswith("| `")]

    assert documented == [
        f"| `{column.name}` | {_type(column.type)} | {column.metadata[b'meaning'].decode()} |"
        for column in getattr(tables, name.upper())
    ]


def test_every_state_of_a_step_has_a_column() -> None:
    kinds = {state.kind for state in states_of(("dp",))}

    assert len(FIXED) < len(states_of(("dp",)))
    assert {f"{kind.replace(' ', '_')}_ns" for kind in kinds} <= set(tables.STEPS.names)


def test_a_straggler_that_moves_between_ranks_has_no_rank() -> None:
    named = Verdict(
        3,
        "alpha",
        "ranks",
        "data",
        "rank 3",
        2.5,
        0.1,
        0.9,
        "because",
        "do this",
        members=(NamedRank(3, "alpha", 2.5),),
    )
    moving = Verdict(-1, "", "job", "gc", "several ranks", 1.0, 0.0, 0.5, "because", "do that")

    table = tables.stragglers([named, moving])

    assert table.schema == tables.STRAGGLERS
    assert table.select(["rank", "ranks", "place", "cause", "cost_ms_per_step"]).to_pylist() == [
        {"rank": 3, "ranks": [3], "place": "ranks", "cause": "data", "cost_ms_per_step": 2.5},
        {"rank": None, "ranks": [], "place": "job", "cause": "gc", "cost_ms_per_step": 1.0},
    ]


def test_causes_of_a_bubble_that_are_not_known_are_null() -> None:
    stage = StageBubble(0, (0, 1), 4, 8, 48, 100, 12, 4, 0, 8, None, None, None, None, 2, 0, left_out=(1,), phase_ns=80)

    [row] = tables.stages([stage]).to_pylist()

    assert (row["stage"], row["ranks"], row["wall_ns"], row["phase_ns"], row["left_out"]) == (0, [0, 1], 100, 80, [1])
    assert (row["bubble_ns"], row["schedule_ns"], row["p2p_ns"]) == (12, None, None)
