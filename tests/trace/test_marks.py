"""Details of marks: what is declared comes through, what cannot be is refused."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from commtrace.trace.hang_report import Activity, InFlight, OpenPhase
from commtrace.trace.json_values import to_json
from commtrace.trace.marks import Marks, check_aggregates, read_mark
from commtrace.trace.metadata import ClockAnchor, DeviceState, Group, GroupMember, PeakMemory
from commtrace.trace.run import DiscardedSegments, FailedCommunication, OsExit, TriggeredDetail
from commtrace.trace.topology import Topology
from tests.fuzz.mutators import DEEP_JSON

GROUP = {"id": 7, "ranks": [0, 2], "ordinal": 0, "role": "dp", "name": "1", "description": "", "backend": "gloo"}

MEMBER = {"world": "a", "run_id": "rollout", "rank": 5, "host": "b", "pid": 7}


def test_a_group_over_worlds_comes_back_with_its_members() -> None:
    detail = {**GROUP, "ranks": [], "world": "c", "key": "d", "members": [None, MEMBER]}
    group = read_mark("process_group", json.dumps(detail), most_ranks=2)

    assert group.members == (None, GroupMember("a", "rollout", 5, "b", 7))
    assert (group.size, group.world, group.key, group.is_over_worlds) == (2, "c", "d", True)
    assert group.to_json() == detail


def test_a_mark_comes_back_with_what_is_declared_of_it() -> None:
    group = Group(7, (0, 2), 0, "dp", "1", "", "gloo")
    assert read_mark("process_group", json.dumps({**GROUP, "rack": 3}), most_ranks=4) == group
    assert read_mark("in_flight", '[{"seq": 3}]', most_ranks=4) == (InFlight(seq=3),)
    assert read_mark("topology", '{"parallel": {"tp": 2}}', most_ranks=4) == {"parallel": {"tp": 2}}
    assert read_mark("end", None, most_ranks=4).frames == ()
    assert read_mark("peak_memory", '{"step": 1, "allocated": 2, "reserved": 3}', most_ranks=4) == PeakMemory(1, 2, 3)


FACTS = {
    "process_group": Group(7, (0, 2), 0, "dp", "1", "", "gloo"),
    "clock_anchor": ClockAnchor(1, 2, 3),
    "device_state": DeviceState(5, 1980, slowdowns=("power cap",), serial="a"),
    "activity": Activity(
        (5, 2, 0, 1), (OpenPhase("forward", "forward", None),), {"7": 3}, ((7, True, 1, 0, 2),), ("a:1 b",)
    ),
    "in_flight": (InFlight("all_reduce", 7, 3, -1, 8, "float32", True, 9, False, "started"), InFlight()),
    "discarded": DiscardedSegments(1, 2, -1, -1, 5),
    "trigger": TriggeredDetail("a", 3, 5, 2, "**", "me", True),
    "failed": FailedCommunication("all_reduce", 7, 3, -1, "RuntimeError", 9),
    "exit": OsExit(3, "KeyError", ("train.py:3 f",), "SIGTERM"),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_comes_back_as_it_was_written(name: str) -> None:
    fact = FACTS[name]
    read = read_mark(name, json.dumps(to_json(fact)), most_ranks=4)
    marks = Marks()
    marks.read(name, read, 1)

    kept = {"activity": marks.activity, "discarded": marks.discarded}.get(name, read)
    assert kept == fact


def test_ranks_that_record_the_same_group_share_its_members() -> None:
    one, other = (read_mark("process_group", json.dumps(GROUP), most_ranks=4) for _ in range(2))

    assert one is other


def test_words_are_escaped_where_they_come_in() -> None:
    mark = read_mark("problem", json.dumps({"message": "a\n\x1b[2J\u202eb"}), most_ranks=1)
    assert mark.message == r"a\n\x1b[2J\u202eb"


def test_a_mark_that_nobody_declared_is_passed_over() -> None:
    assert read_mark("rack", "{oops", most_ranks=1) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("process_group", json.dumps({**GROUP, "ranks": [2, 0]})),
        ("process_group", json.dumps({**GROUP, "ranks": [0, 0]})),
        ("process_group", json.dumps({**GROUP, "ranks": [0, 4]})),
        ("process_group", json.dumps({**GROUP, "ranks": [-1]})),
        ("process_group", json.dumps({**GROUP, "id": 2**63})),
        ("process_group", json.dumps({**GROUP, "members": [{"world": "a", "rank": 0}]})),
        ("process_group", json.dumps({**GROUP, "members": [{**MEMBER, "rank": -1}]})),
        ("process_group", json.dumps({**GROUP, "members": [{**MEMBER, "rank": 2**20}]})),
        ("process_group", json.dumps({**GROUP, "role": None})),
        ("process_group", "[]"),
        ("process_group", ""),
        ("topology", '{"coordinates": {"tp": "0"}}'),
        ("topology", '{"parallel": {"tp": 1e9}}'),
        ("topology", '{"recording": {"sample": "2"}}'),
        ("topology", '{"whatif": {"seq_stride": 0, "pp_size": 2}, "coordinates": {"pp": 0, "dp": 0}}'),
        ("topology", '{"whatif": {"seq_stride": 3, "pp_size": 2}}'),
        ("dropped", '{"collective": NaN}'),
        ("dropped", '{"collective": -1}'),
        ("clock_anchor", '{"monotonic_ns": 9223372036854775808, "realtime_ns": 0}'),
        ("activity", '{"collectives": {"seven": 1}}'),
        ("progress", '{"step": 2147483647}'),
        ("device_state", '{"at_ns": 1, "clock_mhz": "fast"}'),
        ("device_state", '{"clock_mhz": 1}'),
        ("device_state", '{"at_ns": 1, "temperature_c": 100000}'),
        ("peak_memory", '{"step": 1, "allocated": -1, "reserved": 0}'),
        ("peak_memory", '{"step": 1, "allocated": 1}'),
        ("problem", '{"message": "\\ud800"}'),
        ("problem", DEEP_JSON),
        ("end", DEEP_JSON),
    ],
)
def test_marks_with_impossible_values_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_mark(name, text, most_ranks=4)


def test_sums_are_of_kinds_that_exist_and_can_be_added_up() -> None:
    check_aggregates('[["forward", "forward", -1, -1, 3, 300, 0, 200]]')
    for text in (
        '[["forwards", "forward", -1, -1, 3, 300, 0, 200]]',
        '[["forward", "forward", -1, -1, 3, 4611686018427387904, 0, 200]]',
        '[["forward", "forward", -1, -1, 3, 300, 0]]',
        "{}",
        None,
    ):
        with pytest.raises(ValueError, match=r"."):
            check_aggregates(text)


def _recorded_topology() -> set[str]:
    """The keys of all dictionaries that are written out where a topology is recorded."""
    package = Path(__file__).resolve().parents[2] / "commtrace"
    found: set[str] = set()
    for path in [*package.rglob("*.py"), *(package / "integrations").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="set_topology"), args=[ast.Dict(keys=keys), *_]):
                    found |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return found


def test_all_fields_that_a_recorder_gives_its_topology_are_declared() -> None:
    mark = _recorded_topology()
    assert "recording" in mark
    assert mark <= set(Topology.__annotations__)
