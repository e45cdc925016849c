"""The columns of tables: declared once, and documented as they are declared."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from commtrace.analysis.breakdown.states import FIXED, states_of
from commtrace.analysis.pipeline.bubble import StageBubble
from commtrace.findings.finding import Occurrence
from commtrace.python import tables
from tests.findings.reading import slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def _type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return "string"
    if pa.types.is_list(kind):
        return f"list of {kind.value_type}"
    return {"double": "float64"}.get(str(kind), str(kind))


@pytest.mark.parametrize("name", ["spans", "steps", "partition", "ranks", "communication", "stages", "findings"])
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


def test_a_finding_that_moves_between_ranks_has_no_rank() -> None:
    named = slow(2.5, "data", rank=3, host="alpha", occurrence=Occurrence((7,), 60_000_000, 20))
    moving = slow(1.0, "gc", place="job", members=(), gpu_hours_per_day=None)

    table = tables.findings([named, moving])

    assert table.schema == tables.FINDINGS
    assert table.select(["rank", "host", "ranks", "place", "cause", "cost_ns", "occurrence"]).to_pylist() == [
        {
            "rank": 3, "host": "alpha", "ranks": [3], "place": "ranks", "cause": "data", "cost_ns": 2.5e6,
            "occurrence": "once, in step 7: 60 ms",
        },
        {
            "rank": None, "host": "", "ranks": [], "place": "job", "cause": "gc", "cost_ns": 1.0e6, "occurrence": None,
        },
    ]  # fmt: skip


def test_causes_of_a_bubble_that_are_not_known_are_null() -> None:
    stage = StageBubble(0, (0, 1), 4, 8, 48, 100, 12, 4, 0, 8, None, None, None, None, 2, 0, left_out=(1,), phase_ns=80)

    [row] = tables.stages([stage]).to_pylist()

    assert (row["stage"], row["ranks"], row["wall_ns"], row["phase_ns"], row["left_out"]) == (0, [0, 1], 100, 80, [1])
    assert (row["bubble_ns"], row["schedule_ns"], row["p2p_ns"]) == (12, None, None)
