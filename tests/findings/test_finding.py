"""One finding: its words and cost, its place in a list, and what is an effect of it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.findings.causes import CAUSES, LOSSES, PART_OF_LOSS
from commtrace.findings.finding import (
    KINDS,
    NOTHING_COSTS,
    Finding,
    Member,
    Occurrence,
    Stretch,
    finding_id,
    hosts_of,
    ranked,
    reason_of,
    verdict,
    worth_naming,
)

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


def test_json_has_the_line_as_text() -> None:
    assert slow(1, 224).to_json()["text"] == slow(1, 224).line()
    assert msgspec.json.decode(json.dumps(slow(1, 224).to_json()), type=Finding) == slow(1, 224)


def test_what_is_slow_and_lost_time_are_one_list_with_the_costliest_first() -> None:
    costly, cheap = slow(1, 150), slow(2, 5)
    assert ranked([UNKNOWN, LOST, cheap, costly]) == (costly, LOST, cheap, UNKNOWN)


def test_the_verdict_is_the_costliest_with_what_to_do_and_the_next_one() -> None:
    loss, rank = replace(LOST, share=0.2, advice="Balance."), slow(1, 50)
    assert verdict([loss, rank, UNKNOWN]) == (
        "Waiting for pipeline neighbours (bubble): 90 ms per step (20.0% of it). Balance. Then: Rank 1 on a, slow "
        "forward: 50 ms per step (12.5% of it)."
    )
    assert verdict([UNKNOWN]) == "Not judged: Too few steps."
    assert verdict([]) == NOTHING_COSTS


def test_small_parts_of_lost_time_are_not_worth_naming_but_whatever_is_slow_is() -> None:
    small, rank = replace(LOST, share=0.005), slow(1, 1)
    assert worth_naming([rank, small, UNKNOWN]) == (rank,)
    assert verdict([small]) == NOTHING_COSTS


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


@pytest.mark.parametrize("field", ["ranks", "cost_ns", "kind", "members", "stretches", "sigmas", "norm"])
def test_a_finding_from_elsewhere_is_within_bounds(field: str) -> None:
    wrong: dict[str, Any] = {
        "ranks": [-1],
        "cost_ns": 1e30,
        "kind": "fast",
        "members": [{"rank": 2**30, "host": "a", "excess_ns": 1.0}],
        "stretches": [{"first": 1, "last": 2**40, "cost_ns": 1.0}],
        "sigmas": -1.0,
        "norm": "usual",
    }
    plain = msgspec.to_builtins(slow(1, 5))
    assert msgspec.convert(plain, Finding) == slow(1, 5)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({**plain, field: wrong[field]}, Finding)


def test_the_schema_has_the_fields_and_kinds_of_the_type() -> None:
    schema = json.loads(SCHEMA.read_text())["$defs"]["finding"]
    assert tuple(schema["properties"]) == tuple(schema["required"]) == (*Finding.__struct_fields__, "words", "text")
    assert schema["properties"]["kind"]["enum"] == list(KINDS)


def test_every_part_of_lost_time_but_that_of_stragglers_is_a_loss() -> None:
    costs = {field.name for field in fields(LostTime)} - {"num_steps", "gpus", "steps_ns", "ideal_ns", "of_findings"}
    assert set(PART_OF_LOSS.values()) == costs - {"stragglers_ns"}
    assert set(PART_OF_LOSS) <= {*CAUSES, *LOSSES}


@pytest.mark.parametrize(("record", "name"), [(Member, "members"), (Stretch, "stretches"), (Occurrence, "occurrence")])
def test_the_schema_has_the_fields_of_its_parts(record: type[msgspec.Struct], name: str) -> None:
    of_field = json.loads(SCHEMA.read_text())["$defs"]["finding"]["properties"][name]
    part = of_field.get("items", of_field)
    assert tuple(part["properties"]) == tuple(part["required"]) == record.__struct_fields__


def test_two_findings_of_one_id_are_told_apart() -> None:
    assert [one.id for one in ranked([slow(1, 5), slow(1, 9), slow(2, 7)])] == [
        "slow/ranks/forward/1",
        "slow/ranks/forward/2",
        "slow/ranks/forward/1+2",
    ]


def test_an_id_has_the_lowest_rank_if_there_are_ranks() -> None:
    assert finding_id("slow", "host", "compute", [5, 4]) == "slow/host/compute/4"
    assert finding_id("lost", "job", "transfer") == "lost/job/transfer"


def test_what_strikes_now_and_then_says_when_instead_of_a_cost_per_step() -> None:
    once = slow(1, 3, cause="gc", occurrence=Occurrence((7,), 60 * MS, 20))
    assert once.line() == "rank 1 on a, garbage collection: once, in step 7: 60 ms (0.8%)"


def test_the_slowest_rank_and_its_host_stand_for_all() -> None:
    members = (Member(3, "b", 5.0 * MS), Member(1, "a", 4.0 * MS))
    both = slow(3, 5, ranks=(3, 1), members=members, hosts=hosts_of(members, "forward"))
    assert (both.rank, both.host, both.hosts) == (3, "b", ("b", "a"))
    assert (LOST.rank, LOST.host) == (-1, "")
    assert hosts_of(members, "stage_imbalance") == ()


def test_what_stops_the_job_stands_first_as_a_sentence() -> None:
    hang = Finding(id="hang/ranks//3", kind="hang", who="rank 3", ranks=(3,), evidence="Rank 3 has not arrived.")
    assert ranked([slow(1, 50), hang]) == (hang, slow(1, 50))
    assert hang.line() == "Rank 3 has not arrived."
