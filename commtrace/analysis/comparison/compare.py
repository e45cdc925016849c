"""Compare two runs, or several of each side: time, parts of the step, bandwidth, and circumstances.

The noise is that of the steps within each run; that between two starts of a job needs several runs of a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.analysis.breakdown.partition import Partition
from commtrace.analysis.breakdown.states import BUBBLE, TRANSFER, WAIT, State
from commtrace.analysis.chain import Analysis
from commtrace.analysis.communication.bandwidth import WITHOUT_BANDWIDTH, bus_factors, moved_bytes
from commtrace.analysis.communication.calls import CallTable, calls_of_rank
from commtrace.analysis.comparison.noise import MeasuredChange, change_of_runs
from commtrace.analysis.keys import pack, sort_groups
from commtrace.analysis.windows.run import MeasuredRun
from commtrace.trace.json_values import JsonObject
from commtrace.trace.metadata import NODE_VARIABLES
from commtrace.trace.run import Run

FloatArray = npt.NDArray[np.float64]

_ABSENT: Final = "–"

RANKS_RECORDED: Final = "ranks recorded"
"""The circumstance of how many ranks have files."""


class ComparedLink(NamedTuple):
    """A kind of communication whose bandwidth can be compared between runs."""

    role: str
    operation: str
    group_size: int


@dataclass(frozen=True, slots=True)
class StepSeries:
    """Values of each step, ascending: means over the ranks."""

    wall_ns: FloatArray
    states: Mapping[State, FloatArray]  # add up to wall_ns
    busbw_gbps: Mapping[ComparedLink, FloatArray]  # 10⁹ bytes per second of matched transfers, of steps with any

    def __add__(self, later: StepSeries) -> StepSeries:
        none = np.zeros(len(self.wall_ns)), np.zeros(len(later.wall_ns))
        states = dict.fromkeys((*self.states, *later.states))
        links = dict.fromkeys((*self.busbw_gbps, *later.busbw_gbps))
        return StepSeries(
            np.concatenate([self.wall_ns, later.wall_ns]),
            {
                state: np.concatenate([self.states.get(state, none[0]), later.states.get(state, none[1])])
                for state in states
            },
            {
                link: np.concatenate([series.busbw_gbps[link] for series in (self, later) if link in series.busbw_gbps])
                for link in links
            },
        )


def step_series(analysis: Analysis) -> StepSeries:
    table = analysis.partition
    wall, of_state = _mean_over_ranks(table)
    states = {state: of_state[:, column] for column, state in enumerate(table.states) if of_state[:, column].any()}
    return StepSeries(wall, states, _bandwidths(analysis))


def _mean_over_ranks(table: Partition) -> tuple[FloatArray, FloatArray]:
    steps, which = np.unique(table.step, return_inverse=True)
    ranks = np.bincount(which, minlength=len(steps))
    totals = np.zeros((len(steps), len(table.states)))
    np.add.at(totals, which.reshape(-1), table.ns)
    return np.bincount(which, table.wall_ns, len(steps)) / ranks, totals / ranks[:, np.newaxis]


def _bandwidths(analysis: Analysis) -> dict[ComparedLink, FloatArray]:
    context = analysis.context
    parts = [
        part
        for rank, trace in context.run.ranks.items()
        for part in calls_of_rank(
            trace,
            context.matches.ranks[rank],
            analysis.partition.stalled_ns[rank],
            context.roles.ranks[rank],
            context.steps,
        )
    ]
    calls = CallTable.concatenate(parts)
    is_timed = calls.complete & calls.finished & calls.transfer_exact
    matched = np.flatnonzero((calls.calls > 0) & is_timed & (calls.group_size > 1) & (calls.num_bytes >= 0))
    if not len(matched):
        return {}
    calls = calls.take(matched)
    order, begins = sort_groups(pack((calls.role, calls.name, calls.group_size)))
    links = {}
    for rows in np.split(order, begins[1:]):
        link, series = _bandwidth_per_step(context.run, context.roles.words, calls.take(rows))
        if len(series):
            links[link] = series
    return links


def _bandwidth_per_step(run: Run, words: tuple[str, ...], calls: CallTable) -> tuple[ComparedLink, FloatArray]:
    """Return the busbw of one link in each step: bytes on the bus over the sum of the transfers."""
    code = int(calls.name[0])
    link = ComparedLink(words[calls.role[0]], run.names[code] if code >= 0 else "unknown", int(calls.group_size[0]))
    if link.operation in WITHOUT_BANDWIDTH:
        return link, np.empty(0)
    on_the_bus = moved_bytes(link.operation, calls.num_bytes, calls.self_bytes) * bus_factors(
        link.operation, link.group_size, calls.self_bytes
    )
    steps, which = np.unique(calls.step, return_inverse=True)
    time = np.bincount(which.reshape(-1), calls.transfer, len(steps))
    carried = np.bincount(which.reshape(-1), on_the_bus, len(steps))
    known = (time > 0) & (carried > 0)
    return link, carried[known] / time[known]


class Difference(NamedTuple):
    """A circumstance in which the runs differ."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of two runs, or of several of each side."""

    runs: tuple[int, int]  # number of runs of each side
    steps: tuple[int, int]  # least number of steps of each side's runs
    wall_ns: MeasuredChange  # mean over the ranks, median over the steps
    mean_ns: MeasuredChange  # mean over the ranks and the steps: slow ones that are few count in it
    parts: Mapping[State, MeasuredChange]  # largest absolute difference first
    busbw_gbps: Mapping[ComparedLink, MeasuredChange]  # most changed first
    circumstances: tuple[Difference, ...]  # versions, environment and layout that differ

    def is_slower(self, threshold: float) -> bool:
        """Return whether a step of the second side is longer by more than ``threshold`` (0.05: 5 %) and the noise."""
        changes = (self.wall_ns, self.mean_ns)
        return any(change.is_real and (change.relative or 0.0) > threshold for change in changes)

    @property
    def step_change(self) -> MeasuredChange:
        """Return the change of the median or of the mean step: the larger one beyond the noise; else the median's."""
        real = [change for change in (self.wall_ns, self.mean_ns) if change.is_real]
        return max(real, key=lambda change: abs(change.relative or 0.0), default=self.wall_ns)

    @property
    def can_be_judged(self) -> bool:
        """Return whether there are enough steps to know the noise."""
        return self.wall_ns.noise is not None

    def to_json(self) -> JsonObject:
        return {
            "runs": {"before": self.runs[0], "after": self.runs[1]},
            "steps": {"before": self.steps[0], "after": self.steps[1]},
            "wall_ns": self.wall_ns.to_json(),
            "mean_ns": self.mean_ns.to_json(),
            "parts_ns": [
                {"state": state.kind, "detail": state.detail, **change.to_json()}
                for state, change in self.parts.items()
            ],
            "busbw_gbps": [{**link._asdict(), **change.to_json()} for link, change in self.busbw_gbps.items()],
            "circumstances": [difference._asdict() for difference in self.circumstances],
        }


def compare(before: Sequence[MeasuredRun[StepSeries]], after: Sequence[MeasuredRun[StepSeries]]) -> RunComparison:
    series = [[run.result for run in side] for side in (before, after)]
    runs = [[run.recorded for run in side] for side in (before, after)]
    some_are_missing = [any(len(run.ranks) < run.world_size for run in side) for side in runs]
    split_is_known = (not some_are_missing[0] or some_are_missing[1], not some_are_missing[1] or some_are_missing[0])
    return compare_series(series[0], series[1], tuple(_circumstances(runs[0], runs[1])), split_is_known)


def compare_series(
    before: Sequence[StepSeries],
    after: Sequence[StepSeries],
    circumstances: tuple[Difference, ...] = (),
    split_is_known: tuple[bool, bool] = (True, True),
) -> RunComparison:
    """Compare the series of two sides.

    ``split_is_known`` is False for a side if ranks are missing on this side only: waits then cannot be compared.
    """
    return RunComparison(
        runs=(len(before), len(after)),
        steps=(min(len(series.wall_ns) for series in before), min(len(series.wall_ns) for series in after)),
        wall_ns=change_of_runs([series.wall_ns for series in before], [series.wall_ns for series in after]),
        mean_ns=change_of_runs([series.wall_ns for series in before], [series.wall_ns for series in after], np.mean),
        parts=_parts(before, after, split_is_known),
        busbw_gbps=_links(before, after),
        circumstances=circumstances,
    )


def _parts(
    before: Sequence[StepSeries], after: Sequence[StepSeries], split_is_known: tuple[bool, bool]
) -> dict[State, MeasuredChange]:
    # A state that a run does not have took no time in it; a bandwidth that it does not have is unknown.
    def times(side: Sequence[StepSeries], state: State, is_known: bool) -> list[FloatArray]:
        if not is_known and state.kind in (WAIT, TRANSFER, BUBBLE):
            return []
        return [series.states.get(state, np.zeros(len(series.wall_ns))) for series in side]

    states = {state: None for series in (*before, *after) for state in series.states}
    changes = {
        state: change_of_runs(times(before, state, split_is_known[0]), times(after, state, split_is_known[1]))
        for state in states
    }
    return dict(sorted(changes.items(), key=lambda item: (-abs(item[1].difference or 0), item[0])))


def _links(before: Sequence[StepSeries], after: Sequence[StepSeries]) -> dict[ComparedLink, MeasuredChange]:
    def bandwidths(side: Sequence[StepSeries], link: ComparedLink) -> list[FloatArray]:
        return [series.busbw_gbps.get(link, np.empty(0)) for series in side]

    links = {link: None for series in (*before, *after) for link in series.busbw_gbps}
    changes = {link: change_of_runs(bandwidths(before, link), bandwidths(after, link)) for link in links}
    return dict(sorted(changes.items(), key=lambda item: (-abs(item[1].relative or 0), item[0])))


def _circumstances(before: Sequence[Run], after: Sequence[Run]) -> Iterator[Difference]:
    sides = [_circumstances_of_side(side) for side in (before, after)]
    for what in sorted({*sides[0], *sides[1]}):
        values = [side.get(what, _ABSENT) for side in sides]
        if values[0] != values[1]:
            yield Difference(what, *values)


def _circumstances_of_side(runs: Sequence[Run]) -> dict[str, str]:
    values_of_circumstance: dict[str, dict[str, None]] = {}
    for circumstances in map(_circumstances_of_run, runs):
        for what, value in circumstances.items():
            values_of_circumstance.setdefault(what, {})[value] = None
    return {what: " / ".join(values) for what, values in values_of_circumstance.items()}


def _circumstances_of_run(run: Run) -> dict[str, str]:
    """Return the circumstances of a run by name; values in which its ranks differ are all listed."""
    values_of_circumstance: dict[str, dict[str, None]] = {}
    for trace in run.ranks.values():
        metadata = trace.metadata
        framework = trace.topology.get("framework") or {}
        for what, value in (
            ("world size", metadata.world_size),
            ("backend", metadata.backend),
            ("device", metadata.device),
            *((f"{name} (version)", version) for name, version in metadata.versions.items()),
            *((name, value) for name, value in metadata.environment.items() if name not in NODE_VARIABLES),
            *((f"{name} (parallel)", size) for name, size in trace.parallel.items()),
            *((f"framework {name}", value) for name, value in framework.items()),
        ):
            values_of_circumstance.setdefault(what, {})[str(value)] = None
    hosts = len({trace.metadata.node for trace in run.ranks.values()})
    counts = {"hosts": str(hosts), RANKS_RECORDED: f"{len(run.ranks)} of {run.world_size}"}
    return {what: ", ".join(values) for what, values in values_of_circumstance.items()} | counts
