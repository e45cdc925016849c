"""What is found in a run does not depend on the order, codes and blocks of its rows, or on the zero of its clocks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from commtrace.analysis.summary import summarise
from commtrace.synth import Fault, Job, random_clocks, synthesize
from commtrace.trace import blocks
from commtrace.trace.metadata import ClockAnchor
from commtrace.trace.run import Run

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("zb1p", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2)]


def simulated(schedule: tuple[str, int], **sizes: Any) -> Job:
    name, chunks = schedule
    return Job(schedule=name, chunks=chunks, layers=12, **sizes)


JOBS = st.builds(
    simulated,
    tp=st.integers(1, 2),
    pp=st.integers(1, 3),
    dp=st.integers(1, 2),
    microbatches=st.just(6),
    steps=st.integers(4, 9),
    schedule=st.sampled_from(SCHEDULES),
    overlap_grad_reduce=st.booleans(),
    missing=st.sampled_from([0.0, 0.05]),
    jitter=st.sampled_from([0.0, 0.02]),
    faults=st.sampled_from([(), (Fault.parse("slow-rank=0:1.4"),), (Fault.parse("data=0:30"),)]),
    seed=st.integers(0, 2**20),
    gpus_per_host=st.just(2),
    clocks=st.sampled_from([{}, random_clocks(8, wall_error_ns=2_000_000, drift_ppm=5)]),
)


def summary_of(run: Run) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(json.dumps(summarise(run).to_json()))
    return summary


@settings(max_examples=6, deadline=None)
@given(job=JOBS, seed=st.integers(0, 2**20))
def test_a_summary_does_not_depend_on_the_order_of_rows_and_names(job: Job, seed: int) -> None:
    run = synthesize(job).run
    turned = {
        rank: replace(trace, spans=_recoded(_among_equals(trace.spans, seed), len(run.names)))
        for rank, trace in run.ranks.items()
    }

    assert summary_of(Run(run.path, turned, run.names[::-1])) == summary_of(run)


@settings(max_examples=6, deadline=None)
@given(job=JOBS, offset=st.integers(0, 10**15))
def test_a_summary_does_not_depend_on_the_zero_of_the_clocks(job: Job, offset: int) -> None:
    run = synthesize(replace(job, clocks={})).run
    moved = {
        rank: replace(
            trace,
            spans=trace.spans.replace(start=trace.spans.start + offset, end=trace.spans.end + offset),
            metadata=replace(trace.metadata, anchor=_moved(trace.metadata.anchor, offset)),
            anchors=tuple(_moved(anchor, offset) for anchor in trace.anchors),
        )
        for rank, trace in run.ranks.items()
    }
    moved_summary, expected = summary_of(replace(run, ranks=moved)), summary_of(run)

    for host in moved_summary["alignment"]["hosts"]:
        for step in host["steps"]:
            step["at_ns"] -= offset
    for host in (*moved_summary["alignment"]["hosts"], *expected["alignment"]["hosts"]):
        host.pop("offset_ns")
    assert moved_summary == expected


@settings(max_examples=6, deadline=None)
@given(job=JOBS, rows=st.sampled_from([1, 500, 2_000]))
def test_a_summary_does_not_depend_on_which_ranks_are_in_one_block(job: Job, rows: int) -> None:
    run = synthesize(job).run
    expected = summary_of(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ROWS_OF_BLOCK", rows)
        divided = replace(run)
        assert rows > 1 or len(list(divided.blocks)) == len(run.ranks)
        assert summary_of(divided) == expected


def _moved(anchor: ClockAnchor, offset: int) -> ClockAnchor:
    return structs.replace(anchor, monotonic_ns=anchor.monotonic_ns + offset)


def _recoded(spans: Any, count: int) -> Any:
    """The same words under the codes of a list that was turned round."""
    turned = {
        name: np.where(getattr(spans, name) >= 0, count - 1 - getattr(spans, name), -1).astype(np.int32)
        for name in ("name", "dtype")
    }
    return spans.replace(**turned)


def _among_equals(spans: Any, seed: int) -> Any:
    """The rows with those of equal times in another order: the reader promises none among them."""
    lottery = np.random.default_rng(seed).random(len(spans))
    return spans.take(np.lexsort((lottery, -spans.end, spans.start)))
