"""Where communication stopped, who was there, who was not, and who is at the root of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.rank_state import find_endings, own_frame
from commtrace.analysis.hangs.stops import Chains, Stop, find_chains, find_stops
from commtrace.analysis.matching.arrivals import find_arrivals
from commtrace.trace.quiet import QuietChange
from commtrace.trace.run import Run
from tests.analysis.hung_runs import END, NOW_NS, SECOND, activity, done, flight, stopped_run
from tests.factory import group, p2p, span
from tests.findings.reading import said

TP = group("tp", 0, 1)
RIGHT = group("tp", 2, 3)
DP = group("dp", 1, 2)
PAIR = group("pp", 0, 1)
WORLD = group("world", 0, 1, 2)


def stops_of(run: Run) -> list[Stop]:
    return find_stops(run, find_arrivals(run), find_endings(run, NOW_NS))


def chains_of(run: Run) -> Chains:
    arrivals, endings = find_arrivals(run), find_endings(run, NOW_NS)
    return find_chains(find_stops(run, arrivals, endings), arrivals, endings)


def test_a_group_without_a_role_is_named_by_its_ranks() -> None:
    made = group("unknown", 0, 1)
    run = stopped_run({0: done({made: 5}), 1: done({made: 5})}, [made], in_flight={0: [flight(made, 5)]})
    assert examine(run, now_ns=NOW_NS).hang.sentences[0].startswith("Hung at seq 5 of the group of ranks 0–1. ")


def test_a_rank_that_never_comes_is_named_with_the_number_and_the_wait() -> None:
    run = stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 5)]})
    (stop,) = stops_of(run)

    assert (stop.kind, stop.group_id, stop.seq) == ("hung", TP.id, 5)
    assert (stop.arrived, dict(stop.missing), stop.unknown) == ((0,), {1: 4}, ())
    assert stop.operations == {"all_reduce": (0,)}
    assert (stop.waited_ns, stop.longest_before_ns) == (60 * SECOND, 1_000_000)
    assert dict(chains_of(run).roots) == {1: 1}


def test_garbage_that_other_threads_make_meanwhile_hides_no_place() -> None:
    garbage = span("gc", END - SECOND, END + SECOND)
    loading = activity(open=[{"kind": "user", "name": "load shard", "since": 41 * SECOND}])
    run = stopped_run(
        {0: done({TP: 5}), 1: [*done({TP: 5}), garbage]}, [TP], in_flight={0: [flight(TP, 5)]}, activities={1: loading}
    )
    assert "Rank 1: inside user load shard" in examine(run, now_ns=NOW_NS).hang.sentences[-1]


def test_a_wait_that_the_group_has_had_before_is_no_hang() -> None:
    slow = [{**row, "end": row["start"] + 30 * SECOND} for row in done({TP: 2})]
    run = stopped_run({0: slow, 1: slow}, [TP], in_flight={0: [flight(TP, 2)]})
    assert [(stop.kind, stop.longest_before_ns) for stop in stops_of(run)] == [("waiting", 30 * SECOND)]


def test_a_rank_stopped_in_the_middle_of_its_work_had_come_as_far_as_others_got_with_it() -> None:
    """Its last rows were never written; but without it rank 0 would not have come out of number 49."""
    frozen: dict[str, Any] = {
        "last": {1: 96},
        "in_flight": {0: [flight(TP, 50, since=96)], 1: [flight(TP, 41, since=95)]},
    }
    run = stopped_run({0: done({TP: 50}), 1: done({TP: 41})}, [TP], **frozen)
    (stop,) = stops_of(run)
    assert (stop.kind, stop.seq, stop.arrived, dict(stop.missing)) == ("hung", 50, (0,), {1: 49})
    assert stop.waited_ns == 4 * SECOND

    diagnosis = examine(run, now_ns=NOW_NS - 3600 * SECOND, ask=lambda metadata: "runs")
    assert {one.state for one in diagnosis.ranks} == {"running"}
    assert said(diagnosis.findings) == ["The job hangs: 1 communication is held up by rank 1."]


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_leaving_a_collective_with_a_root_proves_nothing_about_the_other_ranks(operation: str) -> None:
    rows = {rank: [{**row, "name": operation} for row in done({TP: count})] for rank, count in {0: 50, 1: 41}.items()}
    run = stopped_run(rows, [TP], in_flight={0: [flight(TP, 50, operation=operation)]})
    assert find_arrivals(run)[1].arrived == {TP.id: 41}


def test_the_last_communication_of_a_rank_may_have_failed() -> None:
    run = stopped_run({0: done({TP: 6}), 1: done({TP: 5})}, [TP], closed=[0])
    assert find_arrivals(run)[1].arrived == {TP.id: 5}


def test_a_suspended_process_is_told_at_once_with_what_lets_it_go_on() -> None:
    """Rank 1 has just written; for rank 0 the wait would not be unusual yet."""
    slow = [{**row, "end": row["start"] + 30 * SECOND} for row in done({TP: 5})]
    run = stopped_run({0: slow, 1: slow}, [TP], in_flight={0: [flight(TP, 5, since=97)]})
    diagnosis = examine(
        run,
        now_ns=NOW_NS - 3600 * SECOND + SECOND // 2,
        ask=lambda metadata: "suspended" if metadata.rank == 1 else "runs",
    )
    assert said(diagnosis.findings) == [
        "The job hangs: 1 communication is held up by rank 1.",
        "Rank 1 gave its last sign of life 0.5 s before the others: process 1001 on node0 is suspended, by SIGSTOP or "
        "a debugger; kill -CONT 1001 lets it go on.",
    ]


def test_a_process_that_lives_and_writes_nothing_holds_the_lock_of_the_interpreter() -> None:
    run = stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 5)]}, last={1: 80})
    diagnosis = examine(run, now_ns=NOW_NS - 3600 * SECOND, ask=lambda metadata: "runs")
    assert diagnosis.findings[1].evidence == (
        "Rank 1 gave its last sign of life 20 s before the others: process 1001 on node0 lives and lets no other "
        "thread of Python run; py-spy dump --native --pid 1001 shows where."
    )


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (
            "runs",
            "process 1001 on node0 lives and lets no other thread of Python run: code in C keeps its lock, at "
            "/job/train.py:12 main; py-spy dump --native --pid 1001 shows which.",
        ),
        (
            "gone",
            "process 1001 on node0 is gone; before, code in C at /job/train.py:12 main let no other thread of Python "
            "run.",
        ),
        (
            None,
            "code in C at /job/train.py:12 main let no other thread of Python run; py-spy dump --native --pid 1001 on "
            "node0 shows which, if it lives.",
        ),
    ],
)
def test_a_rank_that_left_its_stack_is_reported_with_its_place(process: str | None, why: str) -> None:
    run = stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 5)]}, last={1: 80})
    left = replace(run.ranks[1], stack=("/usr/lib/python3.12/re.py:3 match", "/job/train.py:12 main"))
    run = replace(run, ranks={**run.ranks, 1: left})
    diagnosis = examine(run, now_ns=NOW_NS - 3600 * SECOND, ask=lambda metadata: process)
    (silence,) = [one for one in said(diagnosis.findings) if one.startswith("Rank 1 gave")]
    assert silence == f"Rank 1 gave its last sign of life 20 s before the others: {why}"
    assert diagnosis.first_failure is None


def test_the_first_communication_of_a_group_says_nothing_about_how_long_one_takes() -> None:
    """It waits until all have started."""
    first, *later = done({TP: 5})
    rows = [{**first, "end": first["start"] + 30 * SECOND}, *later]
    (stop,) = stops_of(stopped_run({0: rows, 1: rows}, [TP], in_flight={0: [flight(TP, 5)]}))
    assert (stop.kind, stop.longest_before_ns) == ("hung", 1_000_000)


def test_a_rank_that_raised_did_not_end_in_order() -> None:
    run = stopped_run(
        {0: done({TP: 5}), 1: done({TP: 5})},
        [TP],
        in_flight={0: [flight(TP, 5)]},
        closed=[1],
        exceptions={1: "KeyError"},
    )
    sentences = examine(run, now_ns=NOW_NS).hang.sentences
    assert any("Rank 1 ended with an uncaught KeyError and will not arrive" in one for one in sentences)


def test_the_code_of_a_module_is_a_place_and_a_library_is_none() -> None:
    frames = [
        "/usr/lib/python3.11/threading.py:355 wait",
        "<frozen runpy>:88 _run_code",
        "/home/me/train.py:12 <module>",
    ]
    assert own_frame(frames) == "/home/me/train.py:12 <module>"
    assert own_frame(frames[:2]) is None


def test_a_job_killed_while_it_trains_has_not_hung() -> None:
    run = stopped_run({0: done({TP: 7}), 1: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 7, since=99)]})
    assert stops_of(run) == []


def test_a_rank_that_has_launched_it_is_not_missing() -> None:
    run = stopped_run(
        {0: done({TP: 5}), 1: done({TP: 5})},
        [TP],
        in_flight={0: [flight(TP, 5)]},
        activities={1: activity(collectives={str(TP.id): 6})},
    )
    (stop,) = stops_of(run)
    assert (stop.seq, stop.arrived, dict(stop.missing)) == (5, (0, 1), {})


def test_all_arrived_and_nobody_came_out() -> None:
    run = stopped_run(
        {0: done({TP: 5}), 1: done({TP: 5})},
        [TP],
        in_flight={0: [flight(TP, 5)], 1: [flight(TP, 5, operation="broadcast", bytes=8)]},
    )
    (stop,) = stops_of(run)

    assert (stop.kind, stop.seq, stop.arrived, dict(stop.missing)) == ("hung", 5, (0, 1), {})
    assert stop.operations == {"all_reduce": (0,), "broadcast": (1,)}
    diagnosis = examine(run, now_ns=NOW_NS)
    assert any("Members did not call the same at 1 place" in finding for finding in said(diagnosis.findings))
    (mismatch,) = diagnosis.mismatches.first
    assert (mismatch.differ, mismatch.ended, mismatch.may_be_harmless) == (("operation", "bytes"), False, False)


def test_an_operation_that_nobody_asked_for_again_is_none_that_hangs() -> None:
    """Launched asynchronously, never waited for; the group went on for a long time."""
    run = stopped_run(
        {0: done({TP: 9})[4:], 1: done({TP: 9})[4:]},
        [TP],
        in_flight={rank: [flight(TP, 3, blocking=False)] for rank in (0, 1)},
    )
    assert stops_of(run) == []


def test_a_rank_on_a_device_has_arrived_when_its_stream_has() -> None:
    run = stopped_run(
        {0: done({TP: 5}), 1: done({TP: 5})},
        [TP],
        in_flight={0: [flight(TP, 5, state="started")], 1: [flight(TP, 5, state="scheduled", blocking=False)]},
    )
    (stop,) = stops_of(run)
    assert (stop.arrived, dict(stop.missing)) == ((0,), {1: 4})


def test_the_chain_leads_through_other_groups_to_its_root() -> None:
    """0 waits for 1, which is stuck in another group with 2, which 3 waits for, too."""
    rows = {0: done({TP: 5}), 1: done({TP: 5, DP: 3}), 2: done({DP: 3, RIGHT: 8}), 3: done({RIGHT: 8})}
    run = stopped_run(
        rows,
        [TP, DP, RIGHT],
        in_flight={0: [flight(TP, 5)], 1: [flight(DP, 3)], 3: [flight(RIGHT, 8)]},
    )
    chains = chains_of(run)
    by_group = {stop.group_id: position for position, stop in enumerate(stops_of(run))}

    (link,) = chains.links[by_group[TP.id]]
    assert (link.ranks, link.waits_at_stop, link.is_certain) == ((1,), by_group[DP.id], True)
    assert dict(chains.roots) == {2: 3}
    assert chains.cycles == ()
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.findings[0].evidence == "The job hangs: 3 communications are held up by rank 2."
    assert any("because it is inside seq 3 of the dp group" in sentence for sentence in diagnosis.hang.sentences)


def test_members_that_called_different_operations_are_reported_with_what_and_where() -> None:
    run = stopped_run(
        {rank: done({WORLD: 5}) for rank in range(3)},
        [WORLD],
        in_flight={
            0: [flight(WORLD, 5)],
            1: [flight(WORLD, 5, operation="barrier")],
            2: [flight(WORLD, 5)],
        },
        activities={
            rank: activity(frames=["/job/last.py:3 save" if rank == 1 else "/job/train.py:9 step"]) for rank in range(3)
        },
    )
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.findings[0].evidence == (
        "The job hangs at seq 5 of the world group of ranks 0–2, as which its members called different operations: "
        "all_reduce by ranks 0, 2; barrier by rank 1."
    )
    assert diagnosis.hang.sentences[1] == (
        "  No rank is missing: all have launched it; still inside: ranks 0–2. Compare what they called. They are: "
        "ranks 0, 2 at /job/train.py:9 step; rank 1 at /job/last.py:3 save."
    )


def circle(blocking: bool) -> Run:
    one, two = group("a", 0, 1), group("b", 0, 1, ordinal=1)
    return stopped_run(
        {0: done({one: 2, two: 2}), 1: done({one: 2, two: 2})},
        [one, two],
        in_flight={0: [flight(one, 2)], 1: [flight(two, 2, blocking=blocking)]},
        activities={rank: activity(frames=[f"/job/train.py:{rank} step"]) for rank in range(2)},
    )


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    assert len(chains_of(circle(blocking=True)).cycles) == 1
    (finding, *_) = said(examine(circle(True), now_ns=NOW_NS).findings)
    assert re.fullmatch(r"Deadlock: 2 communications wait for each other: seq 2 of .* and seq 2 of .*\.", finding)
    assert (
        examine(circle(True), now_ns=NOW_NS)
        .hang.sentences[-1]
        .endswith(" They are: rank 0 at /job/train.py:0 step; rank 1 at /job/train.py:1 step.")
    )


def test_the_root_of_another_hang_is_no_part_of_a_deadlock() -> None:
    deadlock, made = circle(blocking=True), group("dp", 2, 3)
    rows = {2: done({made: 2}), 3: done({made: 2})}
    beside = stopped_run(rows, [made], in_flight={2: [flight(made, 2)]}, world_size=4)
    diagnosis = examine(replace(deadlock, ranks={**deadlock.ranks, **beside.ranks}), now_ns=NOW_NS)

    assert [root.rank for root in diagnosis.hang.chains.roots] == [3]
    (finding,) = (finding for finding in diagnosis.findings if finding.kind == "hang")
    assert finding.evidence.startswith("Deadlock: 2 communications wait for each other: ")
    assert (finding.who, finding.ranks) == ("the job", ())


def test_a_wait_in_a_deadlock_is_not_called_usual() -> None:
    """The first message of a pair may take long: while a job runs, it would be no hang by itself."""
    run = stopped_run(
        {0: done({WORLD: 2}), 1: done({WORLD: 2}), 2: done({WORLD: 2})},
        [WORLD, PAIR],
        in_flight={
            0: [flight(WORLD, 2)],
            1: [flight(PAIR, 0, since=60, operation="recv", peer=0)],
            2: [flight(WORLD, 2)],
        },
    )
    diagnosis = examine(run, now_ns=NOW_NS - 3600 * SECOND, ask=lambda metadata: "runs")
    assert [stop.kind for stop in diagnosis.hang.stops] == ["hung", "waiting"]
    assert diagnosis.findings[0].evidence.startswith("Deadlock: 2 communications wait for each other: ")
    assert diagnosis.notes == ()


def test_messages_under_way_make_no_deadlock() -> None:
    """Rank 1 has launched something that it does not wait for: it is busy elsewhere, and the root."""
    chains = chains_of(circle(blocking=False))
    assert chains.cycles == ()
    assert 1 in dict(chains.roots)


def test_a_dead_rank_is_named_by_its_silence() -> None:
    run = stopped_run(
        {0: done({TP: 5}), 1: done({TP: 5})},
        [TP],
        in_flight={0: [flight(TP, 5)], 1: [flight(DP, 3)]},
        last={1: 38},
    )
    diagnosis = examine(run, now_ns=NOW_NS)

    assert [one.state for one in diagnosis.ranks] == ["stopped", "silent"]
    assert (
        "Rank 1 gave its last sign of life 62 s before the others: dead, suspended, or in code that lets no thread "
        "run; look for process 1001 on node0."
    ) in said(diagnosis.findings)
    assert diagnosis.hang.chains.roots == ((1, 1),)


def test_a_rank_that_ended_will_not_come() -> None:
    run = stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 5)]}, closed=[1])
    assert any("ended cleanly and will not arrive" in one for one in examine(run, now_ns=NOW_NS).hang.sentences)


def test_a_member_without_files_is_not_known() -> None:
    run = stopped_run({0: done({TP: 5})}, [TP], in_flight={0: [flight(TP, 5)]}, world_size=2)
    (stop,) = stops_of(run) or (None,)
    assert stop is not None
    assert (stop.arrived, dict(stop.missing), stop.unknown) == ((0,), {}, (1,))


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        ({1: []}, {1: 0}),  # rank 0 has received one
        ({1: [p2p("send", PAIR, 0, 0, 1, 2, id=1), p2p("send", PAIR, 0, 1, 3, 4, id=2)]}, None),
        ({1: [p2p("send", PAIR, 0, 0, 1, 2, id=1)]}, {1: 0}),
    ],
)
def test_a_message_is_waited_for_by_pair_and_tag(rows: Mapping[int, list[dict[str, object]]], missing: object) -> None:
    waiting = flight(PAIR, 1, operation="recv", peer=1)
    received = [p2p("recv", PAIR, 1, 0, 1, 2, id=9)]
    run = stopped_run({0: received, **rows}, [PAIR], in_flight={0: [waiting]})
    (stop,) = stops_of(run)

    assert stop.message == (1, 0, 0)
    assert stop.seq == 1
    assert dict(stop.missing) == ({} if missing is None else missing)


def test_a_tag_counts_for_itself() -> None:
    tagged = flight(PAIR, (7 << 32) + 2, operation="recv", peer=1)
    run = stopped_run({0: [], 1: [p2p("send", PAIR, 0, 5, 1, 2, id=1)]}, [PAIR], in_flight={0: [tagged]})
    (stop,) = stops_of(run)

    assert (stop.message, stop.seq, dict(stop.missing)) == ((1, 0, 7), 2, {1: None})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert "message 2 from rank 1 to rank 0 (pp, tag 7)" in diagnosis.hang.sentences[0]


def test_a_normal_end_is_healthy() -> None:
    run = stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], closed=[0, 1])
    diagnosis = examine(run, now_ns=NOW_NS)

    assert diagnosis.is_healthy, diagnosis.findings
    assert diagnosis.hang.stops == ()


def test_ranks_that_ended_after_unequally_many_are_reported() -> None:
    run = stopped_run({0: done({TP: 6}), 1: done({TP: 5})}, [TP], closed=[0, 1])
    assert said(examine(run, now_ns=NOW_NS).findings) == [
        "Rank 0 called seq 5 of the tp group of ranks 0–1; rank 1 never did."
    ]


def test_each_unequal_call_has_the_ranks_that_made_it() -> None:
    rows = {0: done({TP: 6}), 1: done({TP: 5}), 2: done({RIGHT: 5}), 3: done({RIGHT: 6})}
    diagnosis = examine(stopped_run(rows, [TP, RIGHT], closed=[0, 1, 2, 3]), now_ns=NOW_NS)

    assert [(finding.evidence, finding.who, finding.ranks, finding.id) for finding in diagnosis.findings] == [
        ("Rank 0 called seq 5 of the tp group of ranks 0–1; rank 1 never did.", "rank 0", (0,), "mismatch/ranks/0"),
        ("Rank 3 called seq 5 of the tp group of ranks 2–3; rank 2 never did.", "rank 3", (3,), "mismatch/ranks/3"),
    ]


def test_each_silent_rank_has_a_finding_and_those_after_four_have_one() -> None:
    now = NOW_NS - 3600 * SECOND
    rows = {rank: done({TP: 5}) if rank < 2 else [] for rank in range(7)}
    diagnosis = examine(stopped_run(rows, [TP], last={rank: 10 * rank for rank in range(1, 7)}), now_ns=now)
    silent = [finding for finding in diagnosis.findings if finding.kind == "silent"]

    assert [finding.ranks for finding in silent] == [(1,), (2,), (3,), (4,), (5, 6)]
    assert [finding.who for finding in silent] == ["rank 1", "rank 2", "rank 3", "rank 4", "ranks 5–6"]
    assert silent[-1].evidence == "So did ranks 5–6."


def test_a_hang_in_steps_that_are_not_recorded_is_found_by_the_numbers() -> None:
    run = stopped_run(
        {0: [], 1: []},
        [TP],
        activities={
            0: activity(60, collectives={str(TP.id): 10}),
            1: activity(60, collectives={str(TP.id): 9}, frames=["/job/train.py:3 load"]),
        },
    )
    object.__setattr__(run.ranks[0], "topology", {"recording": {"steps": "0:2"}})
    (stop,) = stops_of(run)
    assert (stop.kind, stop.seq, dict(stop.missing), stop.waited_ns) == ("hung", 9, {1: 8}, 60 * SECOND)


def test_a_running_job_may_take_its_time_over_the_first_communication() -> None:
    run = stopped_run({0: [], 1: []}, [TP], in_flight={0: [flight(TP, 0, since=70)]})
    arrivals = find_arrivals(run)
    running = find_endings(run, NOW_NS - 3600 * SECOND, lambda metadata: "runs")

    assert [ending.state for ending in running.values()] == ["running", "running"]
    assert [stop.kind for stop in find_stops(run, arrivals, running)] == ["waiting"]
    assert [stop.kind for stop in stops_of(run)] == ["hung"]


def test_a_late_message_in_a_running_job_is_reported_for_the_ranks_that_arrived_before_it() -> None:
    received = [
        p2p("recv", PAIR, 1, seq, seq * SECOND, seq * SECOND + took, id=seq)
        for seq, took in enumerate((9 * SECOND, 1_000_000, 2_000_000))
    ]
    waiting = flight(PAIR, 3, since=90, operation="recv", peer=1)
    run = stopped_run({0: received, 1: []}, [PAIR], in_flight={0: [waiting]})
    running = find_endings(run, NOW_NS - 3600 * SECOND, lambda metadata: "runs")
    (stop,) = find_stops(run, find_arrivals(run), running)
    assert (stop.kind, stop.waited_ns, stop.longest_before_ns) == ("hung", 10 * SECOND, 2_000_000)


def resting(run: Run) -> Run:
    """The run, whose ranks stopped in a step of which nothing is recorded."""
    ranks = {rank: replace(trace, quiet=(QuietChange(9, True),)) for rank, trace in run.ranks.items()}
    return replace(run, ranks=ranks)


def test_who_waits_in_a_step_that_is_not_recorded_follows_from_the_counts() -> None:
    counts = {0: {TP.id: 8}, 1: {TP.id: 7, DP.id: 3}, 2: {DP.id: 2}}
    activities = {
        rank: activity(collectives={str(number): count for number, count in own.items()})
        for rank, own in counts.items()
    }
    run = stopped_run({0: done({TP: 5}), 1: done({TP: 5, DP: 2}), 2: done({DP: 2})}, [TP, DP], activities=activities)
    by_group = {stop.group_id: stop for stop in stops_of(resting(run))}

    assert (by_group[TP.id].kind, by_group[TP.id].seq, by_group[TP.id].arrived) == ("hung", 7, (0,))
    assert (by_group[DP.id].kind, by_group[DP.id].seq, by_group[DP.id].arrived) == ("hung", 2, (1,))
    assert by_group[TP.id].operations == {"a collective": (0,)}
    assert by_group[TP.id].waited_ns == 60 * SECOND
    assert dict(chains_of(resting(run)).roots) == {2: 2}  # rank 1, which rank 0 waits for, waits itself
    assert stops_of(run) == []  # recorded steps would show what is in flight


def test_a_message_that_nobody_sent_in_a_step_that_is_not_recorded() -> None:
    tag = 3
    activities = {
        0: activity(p2p=[(PAIR.id, False, 1, tag, 5), (PAIR.id, True, 1, tag, 9)]),
        1: activity(p2p=[(PAIR.id, True, 0, tag, 4), (PAIR.id, False, 0, tag, 9)]),
    }
    run = resting(stopped_run({0: [], 1: []}, [PAIR], activities=activities))
    (stop,) = stops_of(run)

    assert stop.message is not None
    assert (stop.kind, stop.seq, stop.arrived) == ("hung", 4, (0,))
    assert (stop.message.sender, stop.message.receiver, stop.message.tag) == (1, 0, tag)
    assert dict(chains_of(run).roots) == {1: 1}


def test_ranks_that_go_on_in_a_step_that_is_not_recorded_hang_nowhere() -> None:
    activities = {rank: activity(0, collectives={str(TP.id): 8 - rank}) for rank in range(2)}
    run = resting(stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], activities=activities))

    assert [stop.kind for stop in stops_of(run)] == []
