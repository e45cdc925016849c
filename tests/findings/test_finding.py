"""One finding: its words and cost, its place in a list, and what is an effect of it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.findings.causes import CAUSES, LOSSES, PART_OF_LOSS
from commtrace.findings.finding import KINDS, Finding, ranked, reason_of

MS = 1_000_000
SCHEMA = Path(__file__).parents[2] / "docs" / "json" / "finding.schema.json"


def slow(rank: int, cost_ms: float, **changes: Any) -> Finding:
    fixed = {"place": "ranks", "cause": "forward", "ranks": (rank,), "cost_ns": cost_ms * MS, "share": cost_ms / 400}
    fixed["id"] = f"slow/ranks/forward/{rank}"
    return Finding(kind="slow", who=f"rank {rank} on a", **{**fixed, **changes})


LOST = Finding(id="lost/job/schedule", kind="lost", place="job", cause="schedule", cost_ns=90.0 * MS)
UNKNOWN = Finding(id="not_judged/0", kind="not_judged", evidence="Too few steps.")


def test_a_line_has_who_why_and_the_cost() -> None:
    assert slow(1, 224).line() == "rank 1 on a, slow forward: 224 ms per step (56.0% of it)"
    assert slow(1, 2.345, share=None).line() == "rank 1 on a, slow forward: 2.35 ms per step"
    assert slow(1, 1, cost_ns=None).line() == "rank 1 on a, slow forward"
    assert LOST.line() == "waiting for pipeline neighbours (bubble): 90 ms per step"
    assert UNKNOWN.line() == "Not judged: Too few steps."


def test_what_is_slow_stands_before_lost_time_and_the_costliest_first() -> None:
    costly, cheap = slow(1, 50), slow(2, 5)
    assert ranked([UNKNOWN, LOST, cheap, costly]) == (costly, cheap, LOST, UNKNOWN)


def test_a_wait_is_an_effect_of_the_costliest_finding_that_explains_half_of_it() -> None:
    findings = [slow(2, 30), slow(1, 50), LOST, UNKNOWN]
    assert reason_of(100 * MS, findings) == slow(1, 50)
    assert reason_of(101 * MS, findings) is None
    assert reason_of(1 * MS, [LOST, UNKNOWN, slow(3, 1, cost_ns=None)]) is None


def test_findings_on_the_same_ranks_explain_a_wait_together() -> None:
    both = [slow(1, 30, cause="gc"), slow(1, 25), slow(2, 26)]

    assert reason_of(100 * MS, both) == slow(1, 30, cause="gc")
    assert reason_of(112 * MS, both) is None


def test_findings_on_changing_ranks_are_not_one_reason() -> None:
    both = [slow(1, 30, ranks=(), id="slow/group/sequences"), slow(1, 25, ranks=(), id="slow/link/link")]

    assert reason_of(60 * MS, both) == both[0]
    assert reason_of(100 * MS, both) is None


def test_nobody_waits_for_what_all_ranks_do_alike() -> None:
    assert reason_of(1 * MS, [slow(1, 50, place="job", ranks=())]) is None


@pytest.mark.parametrize("field", ["ranks", "cost_ns", "kind", "steps"])
def test_a_finding_from_elsewhere_is_within_bounds(field: str) -> None:
    wrong = {"ranks": [-1], "cost_ns": 1e30, "kind": "fast", "steps": [[1, 2**40]]}
    plain = msgspec.to_builtins(slow(1, 5))
    assert msgspec.convert(plain, Finding) == slow(1, 5)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({**plain, field: wrong[field]}, Finding)


def test_the_schema_has_the_fields_and_kinds_of_the_type() -> None:
    schema = json.loads(SCHEMA.read_text())["$defs"]["finding"]
    assert tuple(schema["properties"]) == tuple(schema["required"]) == Finding.__struct_fields__
    assert schema["properties"]["kind"]["enum"] == list(KINDS)


def test_every_part_of_lost_time_but_that_of_stragglers_is_a_loss() -> None:
    costs = {field.name for field in fields(LostTime)} - {"num_steps", "gpus", "steps_ns", "ideal_ns", "of_verdicts"}
    assert set(PART_OF_LOSS.values()) == costs - {"stragglers_ns"}
    assert set(PART_OF_LOSS) <= {*CAUSES, *LOSSES}
