"""Who does the same work where no framework tells it: from the direction of messages, and from groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from commtrace.analysis.matched import match_run
from commtrace.analysis.matching.stages import Flow, classes_of
from commtrace.analysis.stragglers.search import Judgement, find_stragglers
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace.run import Run
from tests.factory import Row, group, make_run, p2p, span, stall
from tests.findings.reading import why_not

MS = 1_000_000


def untold(run: Run) -> Run:
    """Return the run as a program records it that has written its parallelism by hand."""
    ranks = {}
    for rank, trace in run.ranks.items():
        groups = {number: structs.replace(one, role="unknown") for number, one in trace.groups.items()}
        none = np.full(len(trace.spans), -1, np.int32)
        spans = trace.spans.replace(stage=none, chunk=none, microbatch=none)
        ranks[rank] = replace(trace, spans=spans, groups=groups, coordinates={}, parallel={}, topology={})
    return replace(run, ranks=ranks)


def classes(run: Run) -> Mapping[int, int | None]:
    return {rank: trace.work_class for rank, trace in match_run(run).run.ranks.items()}


def findings_of(run: Run) -> Judgement:
    matched = match_run(run)
    return find_stragglers(matched.run, matched.matches)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"pp": 4}, [0, 1, 2, 3]),
        ({"pp": 2, "dp": 2}, [0, 0, 1, 1]),
        ({"pp": 2, "dp": 2, "schedule": "gpipe"}, [0, 0, 1, 1]),
        ({"pp": 4, "dp": 2, "schedule": "zero-bubble"}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"pp": 4, "dp": 2, "chunks": 2, "microbatches": 8}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"pp": 2, "chunks": 2, "tp": 2, "microbatches": 4}, [0, 0, 1, 1]),
        ({"pp": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"dp": 4}, [None] * 4),
        ({"tp": 2, "dp": 2}, [None] * 4),
    ],
)
def test_stages_are_found_from_messages(sizes: dict[str, Any], expected: list[int | None]) -> None:
    made = synthesize(Job(**{"microbatches": 4, "steps": 4, "jitter": 0.02, **sizes}))

    assert [*classes(untold(made.run)).values()] == expected
    assert set(classes(made.run).values()) == {None}, "a framework has told them"


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, {"pp": 4, "dp": 2}, {"pp": 4}, {"pp": 2, "dp": 4, "chunks": 2}])
def test_a_last_stage_with_twice_the_work_is_no_straggler(sizes: dict[str, Any]) -> None:
    last = sizes["pp"] - 1
    faults = (Fault.parse(f"uneven-stage={last}:2"),)
    job = Job(**{"microbatches": 4, "steps": 12, "jitter": 0.01, **sizes}, faults=faults)

    findings = findings_of(untold(synthesize(job).run))

    assert (findings.slow, findings.waited_for) == ((), "")
    (sentence,) = why_not(findings.findings)
    assert sentence.endswith(
        "Stages were not compared with each other. COMMTRACE_LAYOUT tells a recording which ranks are one stage: the "
        "sizes of the parallel dimensions, that of neighbouring ranks first, whose product is the number of ranks of "
        "the job."
    )


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, {"pp": 4, "dp": 2}, {"pp": 2, "tp": 2}])
@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_rank_is_named_among_those_of_its_stage(sizes: dict[str, Any], slow: int) -> None:
    faults = (Fault.parse(f"uneven-stage={sizes['pp'] - 1}:2"), Fault.parse(f"slow-rank={slow}:2.5"))
    job = Job(**{"microbatches": 4, "steps": 12, "jitter": 0.01, **sizes}, faults=faults)

    (verdict,) = findings_of(untold(synthesize(job).run)).slow

    assert (verdict.rank, verdict.cause) == (slow, "compute")


def ring(size: int, *, in_turns: bool) -> Run:
    """Every rank works for 10 ms and passes something to the next one, four times in a step."""
    world, rows = group("world", *range(size)), {rank: list[Row]() for rank in range(size)}
    for rank, own in rows.items():
        number = 0
        for step in range(5):
            begin = now = step * 100 * MS
            for _ in range(4):
                receives_first = in_turns and rank % 2 == 1
                arrives = now + MS // 2
                sends = arrives + MS // 100 if receives_first else now
                for name, peer, start in (("send", (rank + 1) % size, sends), ("recv", (rank - 1) % size, now)):
                    end = arrives + MS // 100 if name == "send" else arrives
                    message = p2p(name, world, peer, number, start, max(end, start), step=step)
                    message["id"] = 2 * number + (name == "recv")
                    own.append(message)
                own.append(stall(own[-1], now, arrives, step=step))
                number += 1
                now += 20 * MS
            own.append(span("step", begin, begin + 100 * MS, step=step))
    return make_run(rows, [world])


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_pass_something_round_a_ring_do_the_same_work(size: int, in_turns: bool) -> None:
    assert set(classes(ring(size, in_turns=in_turns)).values()) == {None}


def test_two_pipelines_in_opposite_directions_have_a_rank_of_each_end_together() -> None:
    mirrored, others = (3,), (4,)
    flows = {0: Flow(-1, mirrored), 1: Flow(0, others), 2: Flow(3, others), 3: Flow(-1, mirrored)}

    assert classes_of(flows) == {0: 0, 1: 1, 2: 1, 3: 0}


def test_a_group_of_several_stages_makes_them_no_peers() -> None:
    """The first and the last stage share the embedding's weights, and all ranks the norm of the gradients."""
    embedding, world = 5, 6
    flows = {0: Flow(-1, (embedding, world)), 1: Flow(0, (world,)), 2: Flow(1, (embedding, world))}

    assert classes_of(flows) == {0: 0, 1: 1, 2: 2}


def test_traffic_of_a_rank_that_was_not_recorded_is_unknown() -> None:
    """Of a rank whose place is not known nobody is a peer, though it shares a group."""
    gradients = 3
    flows = {1: Flow(0, (gradients,)), 3: Flow(2, (gradients,)), 5: Flow(-1, (4,))}

    assert classes_of(flows) == {1: 1, 3: 2, 5: 0}
    assert classes_of({0: Flow(1, (7,)), 1: Flow(0, (7,))}) == {0: 0, 1: 1}, "in a circle nobody is first"


@pytest.mark.parametrize(
    ("works_us", "optimizer_ms", "is_fed"),
    [(1_000, 0, True), (1_000, 40, True), (50, 40, False), (30, 2, False)],
    ids=["a stage", "a stage of a small model", "passed on once in a step", "passed on in a short step"],
)
def test_a_rank_works_on_a_message_if_it_does_so_for_a_while(works_us: int, optimizer_ms: int, is_fed: bool) -> None:
    """Rank 0 sends, and rank 1 sends something back to it, once in a step."""
    world, rows = group("world", 0, 1), {rank: list[Row]() for rank in range(2)}
    for step in range(4):
        begin, worked = step * 100 * MS, works_us * 1_000
        arrives, answers = begin + 5 * MS, begin + 5 * MS + worked
        until = answers + MS + optimizer_ms * MS
        sent = p2p("send", world, 1, step, begin, arrives, step=step, id=2 * step)
        answer = p2p("recv", world, 1, step, arrives, answers + MS, step=step, id=2 * step + 1)
        rows[0] += [span("step", begin, until, step=step), sent, answer, stall(answer, arrives, answers + MS)]
        received = p2p("recv", world, 0, step, begin, arrives, step=step, id=2 * step)
        rows[1] += [span("step", begin, until, step=step), received, stall(received, begin, arrives)]
        rows[1].append(p2p("send", world, 0, step, answers, answers + MS, step=step, id=2 * step + 1))
    run = make_run(rows, [world])

    assert classes(run) == ({0: 0, 1: 1} if is_fed else {0: None, 1: None})
