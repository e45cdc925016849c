"""Runs that are read in windows, and what is compared of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.links import LinkSpeeds, measure_links
from commtrace.analysis.communication.table import CommunicationSums, Detail, communication_sums
from commtrace.analysis.comparison.compare import StepSeries, step_series
from commtrace.analysis.matching.coverage import missing_numbers
from commtrace.analysis.problems import find_problems
from commtrace.analysis.step_totals import StepTotals, TimeTotals, step_totals, time_totals
from commtrace.analysis.straggler_report import report_of_steps
from commtrace.analysis.stragglers.awaited import AwaitedTotals, awaited_totals
from commtrace.analysis.summary import summarise_steps
from commtrace.analysis.windows.run import (
    MeasuredRun,
    OpenedRun,
)
from commtrace.errors import CommtraceError
from commtrace.trace.json_values import to_json
from commtrace.trace.run import Run
from tests.analysis.steps.crossing_runs import crossing_run
from tests.factory import Row, collective, group, make_run, p2p, span, stall
from tests.pipeline_factory import PipelineJob

ALL = group("dp", 0, 1, 2, 3)
BESIDE = group("dp", 0, 1, 2, 3, ordinal=1)


@dataclass(frozen=True)
class Told:
    """All that windows are asked for."""

    communication: tuple[CommunicationSums, ...]
    speeds: LinkSpeeds
    series: StepSeries
    totals: StepTotals
    awaited: AwaitedTotals
    times: TimeTotals

    def __add__(self, other: Told) -> Told:
        sums = zip(self.communication, other.communication, strict=True)
        return Told(
            tuple(one + more for one, more in sums),
            self.speeds + other.speeds,
            self.series + other.series,
            self.totals + other.totals,
            self.awaited + other.awaited,
            self.times + other.times,
        )


def tell(analysis: Analysis) -> Told:
    """Measure what steps are asked for."""
    context, times = analysis.context, analysis.partition
    return Told(
        tuple(
            communication_sums(context.run, context.matches, times, context.roles, context.steps, detail)
            for detail in Detail
        ),
        measure_links(context.run, context.matches, context.steps),
        step_series(analysis),
        step_totals(analysis),
        awaited_totals(context),
        time_totals(analysis),
    )


def plain(run: MeasuredRun[Told]) -> dict[str, Any]:
    """Everything that is said of a run, in plain values."""
    measured_result, recorded = run.result, run.recorded
    totals = measured_result.totals
    divided = measured_result.times.partition()
    return {
        "problems": recorded.problems,
        "alignment": run.alignment.to_json(),
        "steps": run.steps,
        "communication": [[row.to_json() for row in sums.table(recorded)] for sums in measured_result.communication],
        "links": [link.to_json() for link in measured_result.speeds.links()],
        "wall_ns": measured_result.series.wall_ns.tolist(),
        "states": {state: own.tolist() for state, own in sorted(measured_result.series.states.items())},
        "ranks": [mean.to_json() for mean in totals.means(recorded)],
        "means": measured_result.times.means(recorded),
        "summed steps": {kind: totals.steps.total(kind).tolist() for kind in {one.kind for one in totals.steps.states}},
        "critical_path": to_json(totals.critical_path),
        "bandwidth": {
            key: (own.num_bytes, len(own.busbw_gbps), own.busbw_gbps.median())
            for key, own in sorted(totals.bandwidth.bins.items())
        },
        "unmatched": totals.unmatched.find(recorded),
        "modules": [row.to_json() for row in totals.modules],
        "coverage": totals.captured.coverage(recorded),
        "awaited": [one.to_json() for one in measured_result.awaited.longest()],
        "problems found": find_problems(
            recorded, run.alignment, run.steps, run.counts, totals.numbers, (), computes=True
        ),
        "pipeline": to_json(totals.pipeline.pipeline()),
        "missing": missing_numbers(recorded, run.counts),
        "counts": run.counts,
        "numbers": totals.numbers,
        "partition": [getattr(divided, name).tolist() for name in ("rank", "step", "start", "end", "ns", "hidden_ns")],
        "busbw_gbps": {link: own.tolist() for link, own in sorted(measured_result.series.busbw_gbps.items())},
    }


def summary_of(run: OpenedRun) -> str:
    return json.dumps(summarise_steps(run, is_whole=True).to_json())


def stragglers_of(run: OpenedRun) -> str:
    """Everything that is said of who slows the run, or why nothing is."""
    try:
        return json.dumps(report_of_steps(run).to_json())
    except CommtraceError as error:
        return str(error)


def late_numbering_run() -> Run:
    """Rank 1 counts its steps from 3 on: its step 3 is the step 0 of the others."""
    rows: dict[int, list[Row]] = {rank: [] for rank in ALL.ranks}
    for step in range(9):
        for rank in ALL.ranks:
            begin, number = 1_000 * step, step + 3 * (rank == 1)
            done = begin + 700
            row = collective("all_reduce", ALL, step, begin + 500 + 10 * rank, done, id=step, step=number)
            rows[rank] += [
                span("step", begin, begin + 1_000, step=number),
                span("forward", begin + 100, begin + 500 + 10 * rank, step=number),
                row,
                stall(row, begin + 500 + 10 * rank, done, step=number),
            ]
    return make_run(rows, [ALL])


def far_reaching_run() -> Run:
    """Spans of a whole epoch, communication in flight over several steps, and barriers and saving between steps."""
    rows: dict[int, list[Row]] = {rank: [] for rank in ALL.ranks}
    for rank in ALL.ranks:
        late = 7 * rank
        rows[rank] += [
            span("user", 1_900 + late, 7_900 + late, step=1, name="epoch"),
            span("checkpoint", 3_500, 6_100 + late, step=3),
            collective("broadcast", BESIDE, 0, 2_300 + late, 6_600, id=900, step=2, peer=0, is_async=True),
            collective("all_gather", BESIDE, 1, 4_100 + late, 7_350, id=901, step=4, is_async=True),
        ]
        for step in range(10):
            begin = 1_000 * step
            first = collective("all_reduce", ALL, 2 * step, begin + 300 + late, begin + 450, id=2 * step, step=step)
            barrier = collective("barrier", ALL, 2 * step + 1, begin + 930 + late, begin + 980, id=2 * step + 1)
            rows[rank] += [
                span("step", begin + late, begin + 920 + late, step=step),
                span("data", begin + late, begin + 100 + late, step=step),
                span("forward", begin + 100 + late, begin + 300 + late, step=step),
                span("module", begin + 110 + late, begin + 190 + late, step=step, name=f"layers.{step % 3}"),
                span("module", begin + 290 + late, begin + 500 + late, step=step, name="layers.0 backward"),
                span("backward", begin + 450, begin + 900, step=step),
                first,
                stall(first, begin + 300 + late, begin + 450, step=step),
                barrier,
                stall(barrier, begin + 935 + late, begin + 980),
                span("evaluation", begin + 980, begin + 990 + rank),
            ]
    return make_run(rows, [ALL, BESIDE], nodes={0: "a", 1: "a", 2: "b", 3: "b"})


def repeated_run() -> Run:
    """After step 5 the program goes back to step 3, with all ranks, and does it and the following ones again."""
    rows: dict[int, list[Row]] = {rank: [] for rank in ALL.ranks}
    for place, step in enumerate((0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7)):
        for rank in ALL.ranks:
            begin, done = 1_000 * place, 1_000 * place + 700
            launched = begin + 500 + 10 * rank
            row = collective("all_reduce", ALL, place, launched, done, id=place, step=step)
            rows[rank] += [
                span("step", begin, begin + 990, step=step),
                span("forward", begin + 100, launched, step=step),
                row,
                stall(row, launched, done, step=step),
            ]
    return make_run(rows, [ALL])


def apart_run() -> Run:
    """Rank 3 is a step and a half behind the others: only its messages to itself and rank 2 tie it to them."""
    pair = group("pp", 2, 3)
    rows: dict[int, list[Row]] = {rank: [] for rank in (2, 3)}
    for step in range(8):
        for rank, begin in ((2, 1_000 * step), (3, 1_000 * step + 1_500)):
            if rank == 2:
                rows[rank].append(p2p("send", pair, 3, step, begin + 600, begin + 620, id=step, step=step))
            else:
                row = p2p("recv", pair, 2, step, begin + 50, begin + 90, id=step, step=step)
                rows[rank] += [row, stall(row, begin + 50, begin + 90, step=step)]
            rows[rank] += [
                span("step", begin, begin + 1_000, step=step),
                span("forward", begin + 100, begin + 600, step=step, microbatch=0, chunk=0, stage=rank - 2),
                span("backward", begin + 620, begin + 940, step=step, microbatch=0, chunk=0, stage=rank - 2),
            ]
    return make_run(rows, [pair], world_size=4)


MADE = {
    "crossing": crossing_run(),
    "far reaching": far_reaching_run(),
    "late numbering": late_numbering_run(),
    "apart": apart_run(),
    "repeated": repeated_run(),
    "pipeline": PipelineJob(2, 3, data_parallel=2, transfer_ns=7_000, all_reduce_ns=90_000, steps=9).run(),
}
