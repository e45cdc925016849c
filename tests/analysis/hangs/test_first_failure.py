"""Which rank failed first, and which ones ended because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.hangs.first_failure import FirstFailure
from commtrace.analysis.hangs.job_end import end_words, how_it_ended
from commtrace.analysis.hangs.rank_state import find_endings
from commtrace.trace.run import FailedCommunication, OsExit, PeerLook, Run
from tests.analysis.hung_runs import END, NOW_NS, SECOND, done, flight, stopped_run
from tests.factory import group
from tests.findings.reading import said

TP = group("tp", 0, 1)
WORLD = group("world", 0, 1, 2)


def test_the_first_killed_rank_to_stop_is_named() -> None:
    rows = {0: done({TP: 5}), 1: done({TP: 5})}
    broken = (
        "The files of ranks 0–1 break off: killed, a crash below Python, or a directory that could not be written any "
        "more (the log says so)."
    )
    first, together = (
        said(examine(stopped_run(rows, [TP], last={1: last}), now_ns=NOW_NS).findings) for last in (94, 100)
    )
    assert first == [
        "Failed first: rank 1 on node0, whose files break off: killed or crashed below Python, or frozen until all "
        "were killed; its log and dmesg say which. Until it is known why, keep its node out of the next job: start it "
        "on another host.",
        "Rank 1 gave its last sign of life 6.0 s before the others: dead, suspended, or in code that lets no thread "
        "run; look for process 1001 on node0.",
        "The files of rank 0 break off as well: launchers kill the other ranks once one has failed.",
    ]
    assert together == [broken]


def test_a_rank_that_had_ended_in_order_long_before_hides_nobody() -> None:
    rows = {rank: done({TP: 5}) for rank in (0, 1)}
    run = stopped_run({**rows, 2: []}, [TP], closed=[2], last={2: 10, 1: 50})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((1,), raised=False, cut_off=())


def test_a_rank_that_was_killed_while_all_others_raised_is_where_to_look() -> None:
    run = stopped_run(
        {rank: done({WORLD: 5}) for rank in range(3)},
        [WORLD],
        closed=[0, 2],
        exceptions={0: "RuntimeError", 2: "RuntimeError"},
    )
    assert said(examine(run, now_ns=NOW_NS).findings) == [
        "Failed first: rank 1 on node0, whose files break off: killed or crashed below Python; its log and dmesg say "
        "which. Ranks 0, 2 failed because it was gone. Until it is known why, keep its node out of the next job: start "
        "it on another host.",
        "Ranks 0, 2 ended with an uncaught RuntimeError: its message is in the log.",
    ]


def failed(seq: int, exception: str = "RuntimeError") -> FailedCommunication:
    return FailedCommunication("all_reduce", WORLD.id, seq, -1, exception, 99 * SECOND)


def job_of_three(exceptions: Mapping[int, str], cut_off: Sequence[int], frames: Mapping[int, str] = {}) -> Run:
    """Ranks that ended together: with an exception, or without a word; communication of some had failed before."""
    rows = {rank: done({WORLD: 5}) for rank in range(3)}
    run = stopped_run(rows, [WORLD], closed=list(exceptions), exceptions=exceptions)
    ranks = {
        rank: replace(
            trace,
            failures=(failed(5),) if rank in cut_off else (),
            exception_frames=(frames[rank],) if rank in frames else (),
        )
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def test_a_rank_that_raised_by_itself_failed_before_ranks_whose_communication_failed() -> None:
    """And before rank 0, which the launcher killed."""
    run = job_of_three({1: "RuntimeError", 2: "ValueError"}, cut_off=[1], frames={2: "train.py:31 <module>"})
    assert said(examine(run, now_ns=NOW_NS).findings) == [
        "Failed first: rank 2 on node0, with an uncaught ValueError at train.py:31 <module>; its message is in the "
        "log.",
        "Rank 1 ended with an uncaught RuntimeError in all_reduce 5 of the world group of ranks 0–2: its message is in "
        "the log.",
        "The files of rank 0 break off as well: launchers kill the other ranks once one has failed.",
    ]


def test_a_killed_rank_whose_communication_did_not_fail_failed_first() -> None:
    diagnosis = examine(job_of_three({1: "RuntimeError"}, cut_off=[0, 1]), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((2,), raised=False, cut_off=(0, 1))
    assert diagnosis.findings[0].evidence == (
        "Failed first: rank 2 on node0, whose files break off: killed or crashed below Python; its log and dmesg say "
        "which. Ranks 0–1 failed because it was gone. Until it is known why, keep its node out of the next job: start "
        "it on another host."
    )


def test_two_killed_ranks_are_both_named_when_nothing_distinguishes_them() -> None:
    diagnosis = examine(job_of_three({1: "RuntimeError"}, cut_off=[1]), now_ns=NOW_NS)
    assert diagnosis.findings[0].evidence == (
        "Failed first: one of ranks 0, 2, whose files break off; which, the launcher's log says (torchrun: \"first "
        'observed failure").'
    )


def test_a_rank_that_was_gone_when_communication_failed_died_before_ranks_killed_by_the_launcher() -> None:
    run = job_of_three({1: "RuntimeError"}, cut_off=[1])
    run = replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], gone_peers=(PeerLook(0, (2,)), PeerLook(1, (0,))))})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((2,), raised=False, cut_off=(1,))


def seen_by(run: Run, looks: Mapping[int, tuple[tuple[int, ...], ...]]) -> Run:
    """Whom ranks saw end."""
    seen = {
        rank: replace(run.ranks[rank], gone_peers=tuple(PeerLook(at_ns, ended) for at_ns, ended in enumerate(own)))
        for rank, own in looks.items()
    }
    return replace(run, ranks={**run.ranks, **seen})


@pytest.mark.parametrize(
    ("looks", "first"),
    [
        pytest.param({1: ((2,), (0,)), 0: ((2,),)}, [2], id="all saw the same one"),
        pytest.param({1: ((0, 2),), 0: ((2,),)}, [2], id="the first to look saw the least"),
        pytest.param({1: ((2,),), 0: ((1,), (2,))}, [2], id="who had been cut off says nothing"),
        pytest.param({1: ((2,),), 2: ((0,),)}, [0], id="one of them saw the other one end"),
        pytest.param({1: ((2,), (0,)), 0: ((1,),)}, [2], id="who was there after another end was not first"),
    ],
)
def test_the_first_rank_that_its_peers_saw_end_is_named(
    looks: Mapping[int, tuple[tuple[int, ...], ...]], first: list[int]
) -> None:
    diagnosis = examine(seen_by(job_of_three({1: "RuntimeError"}, cut_off=[1]), looks), now_ns=NOW_NS)
    assert diagnosis.first_failure is not None
    assert (diagnosis.first_failure.ranks, diagnosis.first_failure.together) == (tuple(first), False)


MS = 1_000_000
KILLED = (
    "whose files break off: killed or crashed below Python; its log and dmesg say which. Until it is known why, keep "
    "its node out of the next job: start it on another host."
)
LAUNCHER = "break off as well: launchers kill the other ranks once one has failed."
OUTSIDE = (
    "all were ended from outside (scancel, kill, the end of the allocation), or the launcher ended the rest at once: "
    "its log says which."
)

Looks = Mapping[int, tuple[PeerLook, ...]]
"""By rank, as it wrote them down."""


def broken_off(looks: Looks, **changes: Any) -> Run:
    """Ranks of a host that break off at the same time, none of which had noticed anything but what they saw end."""
    run = stopped_run({rank: done({WORLD: 5}) for rank in range(3)}, [WORLD], **changes)
    return replace(run, ranks={rank: replace(own, gone_peers=looks.get(rank, ())) for rank, own in run.ranks.items()})


@pytest.mark.parametrize(
    ("looks", "sentences"),
    [
        pytest.param(
            {0: (PeerLook(0, (2,)), PeerLook(12 * MS, ())), 1: (PeerLook(2 * MS, (2,)), PeerLook(14 * MS, ()))},
            [f"Failed first: rank 2 on node0, {KILLED}", f"The files of ranks 0–1 {LAUNCHER}"],
            id="torchrun killed the rest together",
        ),
        pytest.param(
            {
                0: (PeerLook(0, (2,)), PeerLook(12 * MS, ()), PeerLook(90 * MS, (1,)), PeerLook(102 * MS, ())),
                1: (PeerLook(0, (2,)), PeerLook(12 * MS, ())),
            },
            [f"Failed first: rank 2 on node0, {KILLED}", f"The files of ranks 0–1 {LAUNCHER}"],
            id="the launcher killed one after another",
        ),
        pytest.param(
            {1: (PeerLook(0, (0,)),), 2: (PeerLook(0, (0,)), PeerLook(3 * MS, (1,)))},
            [
                f"Ended first: rank 0 on node0, 3 ms before the next one: {OUTSIDE}",
                "The files of ranks 1–2 break off as well.",
            ],
            id="scancel",
        ),
        pytest.param(
            {1: (PeerLook(0, (0,)),)},
            [
                f"Ended first: rank 0 on node0, right before the others: {OUTSIDE}",
                "The files of ranks 1–2 break off as well.",
            ],
            id="nobody was seen after it",
        ),
        pytest.param(
            {
                1: (PeerLook(0, (0,)), PeerLook(12 * MS, ())),
                2: (PeerLook(0, (0,)), PeerLook(12 * MS, ()), PeerLook(30 * MS, (1,)), PeerLook(53 * MS, ())),
            },
            [
                f"Ended first: rank 0 on node0, 30 ms before the next one: {OUTSIDE}",
                "The files of ranks 1–2 break off as well.",
            ],
            id="one by one",
        ),
        pytest.param(
            {2: (PeerLook(0, (0, 1)), PeerLook(12 * MS, ()))},
            [
                "Failed first: ranks 0–1 on node0, whose files break off together: killed, crashed below Python, or "
                "their host went down; dmesg says which, and if only one of them began it, the launcher's log says "
                '(torchrun: "first observed failure"). Until it is known why, keep their nodes out of the next job: '
                "start it on another host.",
                f"The files of rank 2 {LAUNCHER}",
            ],
            id="a single survivor",
        ),
    ],
)
def test_nobody_raised_and_all_break_off_but_it_was_seen_who_was_first(looks: Looks, sentences: list[str]) -> None:
    """On GPUs, where the others have noticed nothing when the launcher kills them."""
    assert said(examine(broken_off(looks), now_ns=NOW_NS).findings) == sentences


@pytest.mark.parametrize(
    ("signals", "first"),
    [
        pytest.param({0: 15, 1: 0, 2: 15}, (1,), id="the launcher ended the others"),
        pytest.param({0: 15, 1: 0, 2: 0}, (1, 2), id="two ended by themselves"),
        pytest.param({0: 15, 1: 15, 2: 15}, None, id="all were ended"),
        pytest.param({0: 15, 2: 15}, None, id="how one ended is not known"),
        pytest.param({0: 0, 1: 0, 2: 0}, None, id="nothing tells them apart"),
    ],
)
def test_ranks_that_were_sent_a_signal_did_not_fail_first(
    signals: Mapping[int, int], first: tuple[int, ...] | None
) -> None:
    run = broken_off({})
    ended = {rank: replace(trace, end_signal=signals.get(rank)) for rank, trace in run.ranks.items()}
    failure = examine(replace(run, ranks=ended), now_ns=NOW_NS).first_failure
    assert (failure and failure.ranks) == first


def test_hosts_have_monotonic_clocks_of_their_own() -> None:
    run = broken_off({1: (PeerLook(0, (0,)), PeerLook(12 * MS, ())), 2: (PeerLook(5000 * MS, (0,)),)})
    elsewhere = replace(run.ranks[2], metadata=replace(run.ranks[2].metadata, node="node1"))
    diagnosis = examine(replace(run, ranks={**run.ranks, 2: elsewhere}), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((0,), raised=False, cut_off=(), ahead_ns=0)


@pytest.mark.parametrize("last", [{}, {0: 97}])
def test_a_job_that_hung_was_ended_for_that_whoever_went_first(last: Mapping[int, int]) -> None:
    """Ranks that hang write seldom: their last words may be seconds apart, though all were killed together."""
    hung = {rank: [flight(WORLD, 5)] for rank in (0, 1)}
    looks = {1: (PeerLook(0, (0,)), PeerLook(80 * MS, ()))}
    diagnosis = examine(broken_off(looks, in_flight=hung, last=last), now_ns=NOW_NS)
    assert diagnosis.first_failure is None
    assert diagnosis.findings[0].evidence == "The job hangs: 1 communication is held up by rank 2."


def test_a_dead_rank_that_others_waited_for_until_the_launcher_came_failed_first() -> None:
    waiting = {rank: [flight(WORLD, 5, since=96)] for rank in (0, 1)}
    looks = {0: (PeerLook(0, (2,)), PeerLook(12 * MS, ()))}
    diagnosis = examine(broken_off(looks, in_flight=waiting, last={2: 95}), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((2,), raised=False, cut_off=())


def test_a_rank_that_ended_in_order_and_left_the_others_waiting_is_named() -> None:
    run = job_of_three({1: "RuntimeError"}, cut_off=[1])
    run = replace(run, ranks={**run.ranks, 2: replace(run.ranks[2], closed=True)})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((2,), raised=False, cut_off=(1,), ended=True)  # fmt: skip
    assert said(diagnosis.findings) == [
        "Left first: rank 2 ended cleanly, and it never came to all_reduce 5 of the world group of ranks 0–2, in "
        "which rank 1 failed. See why the script ended earlier there: fewer batches, a return, sys.exit.",
        "Rank 1 ended with an uncaught RuntimeError in all_reduce 5 of the world group of ranks 0–2: its message is in "
        "the log.",
        "The files of rank 0 break off as well: launchers kill the other ranks once one has failed.",
    ]


@pytest.mark.parametrize(
    ("cut_off", "sentence"),
    [
        (
            [0, 1],
            "Failed first: rank 2: communication of ranks 0–1 failed, there are no files of rank 2. Killed in its "
            "first seconds, or not recorded: the launcher's log says.",
        ),
        (
            [1],
            "Failed first: one of ranks 0, 2: communication of rank 1 failed, there are no files of rank 2, and the "
            "files of rank 0 break off. Killed in its first seconds, or not recorded: the launcher's log says.",
        ),
    ],
)
def test_a_rank_without_files_may_have_been_killed_before_its_first_word(cut_off: list[int], sentence: str) -> None:
    run = job_of_three(dict.fromkeys(cut_off, "RuntimeError"), cut_off=cut_off)
    run = replace(run, ranks={rank: trace for rank, trace in run.ranks.items() if rank != 2})
    assert examine(run, now_ns=NOW_NS).findings[0].evidence == sentence


def job_of_two(exception: str, frame: str) -> Run:
    """Rank 0 breaks off; rank 1 raises, and no communication of it is known to have failed."""
    run = stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], closed=[1], exceptions={1: exception})
    return replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], exception_frames=(frame, "train.py:38 train"))})


def test_a_survivor_whose_backward_raised_did_not_fail_before_the_rank_that_broke_off() -> None:
    diagnosis = examine(
        job_of_two("RuntimeError", "/venv/torch/autograd/graph.py:979 _engine_run_backward"), now_ns=NOW_NS
    )
    assert said(diagnosis.findings) == [
        "Failed first: one of ranks 0–1: rank 1 ended with an uncaught RuntimeError at "
        "/venv/torch/autograd/graph.py:979 _engine_run_backward, which may be because another rank was gone; the files "
        'of rank 0 break off. Which came first, the launcher\'s log says (torchrun: "first observed failure").'
    ]


@pytest.mark.parametrize(
    ("exception", "frame"),
    [
        ("ValueError", "/venv/torch/autograd/graph.py:9 backward"),
        ("RuntimeError", "/venv/torch/nn/modules/linear.py:9 forward"),
    ],
)
def test_an_exception_that_no_lost_peer_raises_failed_first(exception: str, frame: str) -> None:
    diagnosis = examine(job_of_two(exception, frame), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((1,), raised=True, cut_off=())


def test_a_peer_that_was_gone_comes_before_whatever_was_raised() -> None:
    run = job_of_two("RuntimeError", "/venv/torch/autograd/graph.py:979 _engine_run_backward")
    run = replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], gone_peers=(PeerLook(0, (0,)),))})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((0,), raised=False, cut_off=(1,))


def job_of_two_hosts(last: Mapping[int, int], *, failed_on: Sequence[int] = (0, 1)) -> Run:
    """Ranks 2 and 3, on a host of their own, break off; communication of the others raises."""
    world = group("world", 0, 1, 2, 3)
    rows = {rank: done({world: 5}) for rank in range(4)}
    exceptions = dict.fromkeys(failed_on, "RuntimeError")
    run = stopped_run(rows, [world], closed=failed_on, exceptions=exceptions, last=last)
    ranks = {
        rank: replace(
            trace,
            metadata=replace(trace.metadata, node=f"node{rank // 2}", host=f"node{rank // 2}"),
            failures=(failed(5),) if rank in failed_on else (),
        )
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


@pytest.mark.parametrize("last", [{}, {2: 99}, {2: 30, 3: 30}])
def test_ranks_that_died_with_their_host_are_named_together_with_it(last: Mapping[int, int]) -> None:
    """At about the same time as the others, or long before: until NCCL's watchdog gave up."""
    diagnosis = examine(job_of_two_hosts(last), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((2, 3), raised=False, cut_off=(0, 1), together=True)
    assert diagnosis.findings[0].evidence == (
        "Failed first: ranks 2–3 on node1, whose files break off together: killed, crashed below Python, or their host "
        "went down; dmesg says which, and if only one of them began it, the launcher's log says (torchrun: \"first "
        'observed failure"). Ranks 0–1 failed because they were gone. Until it is known why, keep their nodes out of '
        "the next job: take node1 out of the hostfile."
    )


def test_a_host_that_fell_silent_is_named_though_nobody_raised() -> None:
    diagnosis = examine(job_of_two_hosts({2: 30, 3: 30}, failed_on=()), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((2, 3), raised=False, cut_off=(), together=True)


def test_ranks_that_all_raised_the_same_failed_together() -> None:
    run = job_of_three({0: "KeyError", 1: "KeyError", 2: "KeyError"}, cut_off=[])
    assert said(examine(run, now_ns=NOW_NS).findings) == [
        "Ranks 0–2 ended with an uncaught KeyError: its message is in the log."
    ]


def test_a_failure_that_was_caught_cuts_nobody_off() -> None:
    diagnosis = examine(job_of_three({1: "RuntimeError", 2: "KeyError"}, cut_off=[1, 2]), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((2,), raised=True, cut_off=(1,))


EXIT = OsExit(1, frames=("train.py:31 main",))
BACKWARD = "/venv/torch/autograd/graph.py:979 _engine_run_backward"


def exited(run: Run, exits: Mapping[int, OsExit], cut_off: Sequence[int] = ()) -> Run:
    """A run some ranks of which called os._exit; communication of some had failed before."""
    ended = {
        rank: replace(run.ranks[rank], exit=call, failures=(failed(5),) if rank in cut_off else ())
        for rank, call in exits.items()
    }
    return replace(run, ranks={**run.ranks, **ended})


def two_that_end(**changes: Any) -> Run:
    return stopped_run({0: done({TP: 5}), 1: done({TP: 5})}, [TP], **changes)


@pytest.mark.parametrize("quiet_for", [0, 1, 2, 4])
def test_a_rank_that_called_os_exit_failed_before_one_that_was_quiet_when_it_was_killed(quiet_for: int) -> None:
    run = exited(two_that_end(last={0: 100 - quiet_for}), {1: EXIT})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert said(diagnosis.findings) == [
        "Failed first: rank 1 on node0, which called os._exit(1) at train.py:31 main; its log says why.",
        "The files of rank 0 break off as well: launchers kill the other ranks once one has failed.",
    ]
    assert diagnosis.first_failure == FirstFailure((1,), raised=True, cut_off=())
    assert end_words(*how_it_ended(find_endings(run, NOW_NS, goes_on=False))) == (
        "failed: rank 0 cut off; os._exit(1) on rank 1"
    )


def test_a_rank_that_was_quiet_when_it_was_killed_did_not_fail_before_one_that_raised() -> None:
    run = two_that_end(closed=[1], exceptions={1: "ValueError"}, last={0: 98})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((1,), raised=True, cut_off=())


def test_a_rank_that_had_been_silent_for_longer_than_any_healthy_one_comes_before_an_os_exit() -> None:
    run = exited(two_that_end(last={0: 80}), {1: EXIT})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((0,), raised=False, cut_off=())
    assert "Rank 1 called os._exit(1) at train.py:31 main." in said(diagnosis.findings)


def test_each_exception_has_the_ranks_that_it_ended() -> None:
    whole = group("world", 0, 1, 2, 3, 4)
    rows = {rank: done({whole: 5}) for rank in whole.ranks}
    raised = {0: "RuntimeError", 2: "RuntimeError", 3: "KeyError"}
    run = exited(stopped_run(rows, [whole], closed=[0, 2, 3], exceptions=raised, last={1: 80}), {4: EXIT})
    found = [finding for finding in examine(run, now_ns=NOW_NS).findings if finding.kind == "failed"]

    assert [(finding.evidence.partition(":")[0], finding.ranks, finding.id) for finding in found] == [
        ("Failed first", (1,), "failed/ranks/1"),
        ("Ranks 0, 2 ended with an uncaught RuntimeError", (0, 2), "failed/ranks/0"),
        ("Rank 3 ended with an uncaught KeyError", (3,), "failed/ranks/3"),
        ("Rank 4 called os._exit(1) at train.py", (4,), "failed/ranks/4"),
    ]


def test_a_rank_that_its_peer_saw_end_comes_before_the_os_exit_of_that_peer() -> None:
    run = exited(two_that_end(), {1: EXIT})
    run = replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], gone_peers=(PeerLook(99 * SECOND, (0,)),))})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((0,), raised=False, cut_off=())


@pytest.mark.parametrize(
    ("call", "cut_off"),
    [
        pytest.param(EXIT, [1], id="its communication had failed"),
        pytest.param(OsExit(1, "RuntimeError", ("train.py:9 f",)), [1], id="as it handled that"),
        pytest.param(OsExit(1, "DistBackendError", ("train.py:9 f",)), [], id="as it handled an exception for that"),
    ],
)
def test_a_rank_that_called_os_exit_because_its_communication_failed_was_cut_off(
    call: OsExit, cut_off: Sequence[int]
) -> None:
    diagnosis = examine(exited(two_that_end(), {1: call}, cut_off), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((0,), raised=False, cut_off=(1,))


def test_an_os_exit_for_another_exception_than_the_one_of_a_communication_is_the_failure() -> None:
    call = OsExit(1, "KeyError", ("train.py:9 f",))
    diagnosis = examine(exited(two_that_end(), {1: call}, [1]), now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((1,), raised=True, cut_off=())
    assert diagnosis.findings[0].evidence == (
        "Failed first: rank 1 on node0, which called os._exit(1) while it handled a KeyError of train.py:9 f; its log "
        "says why."
    )


def test_an_os_exit_for_what_a_lost_peer_may_have_caused_is_named_with_the_rank_that_broke_off() -> None:
    call = OsExit(3, "RuntimeError", (BACKWARD, "train.py:9 f"))
    diagnosis = examine(exited(two_that_end(), {1: call}), now_ns=NOW_NS)
    assert diagnosis.findings[0].evidence == (
        "Failed first: one of ranks 0–1: rank 1 called os._exit(3) while it handled a RuntimeError of "
        f"{BACKWARD}, which may be because another rank was gone; the files of rank 0 break off. Which came first, the "
        'launcher\'s log says (torchrun: "first observed failure").'
    )


def test_it_is_the_first_if_the_rank_that_broke_off_saw_it_end() -> None:
    run = exited(two_that_end(), {1: OsExit(3, "RuntimeError", (BACKWARD,))})
    run = replace(run, ranks={**run.ranks, 0: replace(run.ranks[0], gone_peers=(PeerLook(99 * SECOND, (1,)),))})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((1,), raised=True, cut_off=())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_rank_that_called_os_exit_as_the_launcher_ended_it_was_not_the_first(name: str) -> None:
    run = exited(two_that_end(), {0: OsExit(143, signal=name), 1: EXIT})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.first_failure == FirstFailure((1,), raised=True, cut_off=())
    assert f"Rank 0 called os._exit(143) in a handler of {name}." in said(diagnosis.findings)
    assert how_it_ended(find_endings(run, NOW_NS, goes_on=False))[1] == "rank 0 cut off; os._exit(1) on rank 1"


def test_a_handler_of_a_signal_that_a_rank_sends_itself_is_its_own_failure() -> None:
    run = exited(two_that_end(), {1: OsExit(1, signal="SIGALRM")})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((1,), raised=True, cut_off=())


def test_a_killed_rank_that_was_seen_to_end_comes_before_one_that_the_launcher_asked_to_end() -> None:
    run = exited(two_that_end(last={1: 97}), {0: OsExit(143, signal="SIGTERM")})
    looks = (PeerLook(END - 20 * MS, (1,)), PeerLook(END - 8 * MS, ()))
    run = replace(run, ranks={**run.ranks, 0: replace(run.ranks[0], gone_peers=looks)})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((1,), raised=False, cut_off=())


def test_the_watchdog_of_a_rank_that_waits_in_a_hang_is_not_its_cause() -> None:
    run = exited(two_that_end(in_flight={1: [flight(TP, 5)]}), {1: OsExit(1, frames=("watchdog.py:3 run",))})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.first_failure is None
    assert diagnosis.findings[0].evidence == "The job hangs: 1 communication is held up by rank 0."


@pytest.mark.parametrize("exits", [{1: EXIT}, {}])
@pytest.mark.parametrize("last", [97, 80])
def test_a_rank_that_saw_another_one_end_was_alive_after_it(last: int, exits: Mapping[int, OsExit]) -> None:
    """However long before its last write was."""
    run = exited(two_that_end(last={0: last}), exits)
    looks = (PeerLook(END + 5 * MS, (1,)), PeerLook(END + 17 * MS, ()))
    run = replace(run, ranks={**run.ranks, 0: replace(run.ranks[0], gone_peers=looks)})
    first = examine(run, now_ns=NOW_NS).first_failure
    assert first is not None
    assert first.ranks == (1,)


@pytest.mark.parametrize("exception", ["", "ValueError"])
def test_a_rank_that_ended_by_itself_and_was_seen_to_end_comes_before_the_next_one_that_was(exception: str) -> None:
    """Whom the launcher killed."""
    run = job_of_three({1: exception} if exception else {}, cut_off=[])
    run = run if exception else exited(run, {1: EXIT})
    looks = (PeerLook(0, (1,)), PeerLook(12 * MS, ()), PeerLook(110 * MS, (0,)), PeerLook(122 * MS, ()))
    run = replace(run, ranks={**run.ranks, 2: replace(run.ranks[2], gone_peers=looks)})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((1,), raised=True, cut_off=())


def test_ends_that_the_launcher_of_another_host_caused_do_not_hide_the_failure() -> None:
    run = exited(job_of_two_hosts({}, failed_on=()), {3: EXIT})
    run = replace(run, ranks={**run.ranks, 0: replace(run.ranks[0], gone_peers=(PeerLook(0, (1,)),))})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((3,), raised=True, cut_off=())


def test_ranks_that_were_there_after_a_rank_that_was_cut_off_are_not_its_cause() -> None:
    run = job_of_three({1: "RuntimeError"}, cut_off=[1])
    looks = (PeerLook(99 * SECOND, (1,)),)
    run = replace(run, ranks={**run.ranks, 0: replace(run.ranks[0], gone_peers=looks)})
    assert examine(run, now_ns=NOW_NS).first_failure == FirstFailure((2,), raised=False, cut_off=(1,))


def test_ranks_that_all_called_os_exit_alike_failed_together() -> None:
    diagnosis = examine(exited(two_that_end(), {0: EXIT, 1: EXIT}), now_ns=NOW_NS)
    assert diagnosis.first_failure is None
    assert said(diagnosis.findings) == ["Ranks 0–1 called os._exit(1) at train.py:31 main."]


@pytest.mark.parametrize(("last", "first"), [(92, 2), (97, 1)])
def test_a_look_at_others_is_a_sign_of_life_with_which_the_silence_of_another_rank_is_compared(
    last: int, first: int
) -> None:
    """Rank 0 wrote nothing for 5 s, but was there as rank 1 ended: only rank 2 may have been gone before."""
    rows = {rank: done({WORLD: 5}) for rank in range(3)}
    run = exited(stopped_run(rows, [WORLD], last={0: 95, 2: last}), {1: EXIT})
    run = replace(run, ranks={**run.ranks, 0: replace(run.ranks[0], gone_peers=(PeerLook(END, (1,)),))})
    diagnosis = examine(run, now_ns=NOW_NS)
    assert diagnosis.first_failure is not None
    assert diagnosis.first_failure.ranks == (first,)
