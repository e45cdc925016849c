"""What changed between two runs: time, parts of the step, bandwidth, and the circumstances.

>>> sides = [[measure_run(path, step_series)] for path in ("runs/before", "runs/after")]  # doctest: +SKIP
>>> compare(*sides).is_slower(threshold=0.05)                                             # doctest: +SKIP

The noise is that of the steps within each run. What differs from one start of a job to the next (the nodes that it
got, who shares the network) is in it only where a side has several runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analysis.breakdown.states import State
from commtrace.analysis.comparison.noise import Change, change_of_runs
from commtrace.analysis.comparison.step_series import FloatArray, Link, StepSeries
from commtrace.analysis.windows.run import MeasuredRun
from commtrace.trace.json_values import JsonObject
from commtrace.trace.metadata import NODE_VARIABLES
from commtrace.trace.run import Run

_ABSENT: Final = "–"


class Difference(NamedTuple):
    """A circumstance in which the runs differ."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, or several of each side, beside each other.

    Attributes:
        runs: how many of each side.
        steps: how many steps of each side were used, the least of its runs.
        wall_ns: length of a step, mean over the ranks, median over the steps.
        parts: the same of each state; largest absolute difference first.
        busbw_gbps: of each kind of communication that either run has; most changed first.
        circumstances: versions, environment, layout: where the runs differ.
    """

    runs: tuple[int, int]
    steps: tuple[int, int]
    wall_ns: Change
    parts: Mapping[State, Change]
    busbw_gbps: Mapping[Link, Change]
    circumstances: tuple[Difference, ...]

    def is_slower(self, threshold: float) -> bool:
        """Whether a step of the second run takes longer by more than ``threshold`` (0.05: 5 %) and more than chance."""
        relative = self.wall_ns.relative
        return self.wall_ns.is_real and relative is not None and relative > threshold

    @property
    def can_be_judged(self) -> bool:
        """False where too few steps were recorded to know the noise."""
        return self.wall_ns.noise is not None

    def to_json(self) -> JsonObject:
        return {
            "runs": {"before": self.runs[0], "after": self.runs[1]},
            "steps": {"before": self.steps[0], "after": self.steps[1]},
            "wall_ns": self.wall_ns.to_json(),
            "parts_ns": [
                {"state": state.kind, "detail": state.detail, **change.to_json()}
                for state, change in self.parts.items()
            ],
            "busbw_gbps": [{**link._asdict(), **change.to_json()} for link, change in self.busbw_gbps.items()],
            "circumstances": [difference._asdict() for difference in self.circumstances],
        }


def compare(before: Sequence[MeasuredRun[StepSeries]], after: Sequence[MeasuredRun[StepSeries]]) -> Comparison:
    """Compare the runs of one side, one or several, with those of the other."""
    series = [[run.result for run in side] for side in (before, after)]
    runs = [[run.recorded for run in side] for side in (before, after)]
    return compare_series(series[0], series[1], tuple(_circumstances(runs[0], runs[1])))


def compare_series(
    before: Sequence[StepSeries], after: Sequence[StepSeries], circumstances: tuple[Difference, ...] = ()
) -> Comparison:
    """The same of their series."""
    return Comparison(
        runs=(len(before), len(after)),
        steps=(min(len(one.wall_ns) for one in before), min(len(one.wall_ns) for one in after)),
        wall_ns=change_of_runs([one.wall_ns for one in before], [one.wall_ns for one in after]),
        parts=_parts(before, after),
        busbw_gbps=_links(before, after),
        circumstances=circumstances,
    )


def _parts(before: Sequence[StepSeries], after: Sequence[StepSeries]) -> dict[State, Change]:
    # A state that a run does not have took no time in it; a bandwidth that it does not have is unknown.
    def times(side: Sequence[StepSeries], state: State) -> list[FloatArray]:
        return [one.states.get(state, np.zeros(len(one.wall_ns))) for one in side]

    states = {state: None for one in (*before, *after) for state in one.states}
    changes = {state: change_of_runs(times(before, state), times(after, state)) for state in states}
    return dict(sorted(changes.items(), key=lambda item: (-abs(item[1].difference or 0), item[0])))


def _links(before: Sequence[StepSeries], after: Sequence[StepSeries]) -> dict[Link, Change]:
    def bandwidths(side: Sequence[StepSeries], link: Link) -> list[FloatArray]:
        return [one.busbw_gbps.get(link, np.empty(0)) for one in side]

    links = {link: None for one in (*before, *after) for link in one.busbw_gbps}
    changes = {link: change_of_runs(bandwidths(before, link), bandwidths(after, link)) for link in links}
    return dict(sorted(changes.items(), key=lambda item: (-abs(item[1].relative or 0), item[0])))


def _circumstances(before: Sequence[Run], after: Sequence[Run]) -> Iterator[Difference]:
    told = [_told_of_side(side) for side in (before, after)]
    for what in sorted({*told[0], *told[1]}):
        values = [one.get(what, _ABSENT) for one in told]
        if values[0] != values[1]:
            yield Difference(what, *values)


def _told_of_side(runs: Sequence[Run]) -> dict[str, str]:
    """Of several runs, those values in which they differ are all listed."""
    found: dict[str, dict[str, None]] = {}
    for told in map(_told, runs):
        for what, value in told.items():
            found.setdefault(what, {})[value] = None
    return {what: " / ".join(values) for what, values in found.items()}


def _told(run: Run) -> dict[str, str]:
    """Everything about a run that is no measurement, by name. Ranks that differ among themselves are all listed."""
    told: dict[str, dict[str, None]] = {}
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
            told.setdefault(what, {})[str(value)] = None
    hosts = len({trace.metadata.node for trace in run.ranks.values()})
    return {what: ", ".join(values) for what, values in told.items()} | {"hosts": str(hosts)}
