"""The scalars of TensorBoard, W&B and MLflow: the parts of a step, rates, and the job by the monitor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from commtrace.findings.finding import LOST, SLOW
from commtrace.findings.status import JobMeans, JobView, LiveEvent
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepSummary, mfu

PREFIX = "commtrace"
JOB = "job"

_WORDS: Final = {"unknown": "other"}


class Point(NamedTuple):
    """Scalars at one step: means over all steps since the point before, so that parts add up."""

    scope: str  # rank_0 for a rank, job for all ranks
    step: int
    time: float  # epoch seconds at which the step ended
    values: Mapping[str, float]

    @property
    def tagged(self) -> dict[str, float]:
        """Return the values by their full names, ``commtrace/rank_0/step_seconds``."""
        return {f"{PREFIX}/{self.scope}/{name}": value for name, value in self.values.items()}


class DatedEvent(NamedTuple):
    """An event of the monitor, with this rank's newest step when it was found; −1 before the first."""

    step: int
    event: LiveEvent


class StepSums:
    """Adds up the steps of a rank. Not thread-safe."""

    def __init__(self) -> None:
        self.last: StepSummary | None = None
        self._steps = 0
        self._ns: defaultdict[str, int] = defaultdict(int)
        self._counts: defaultdict[str, float] = defaultdict(float)

    def add(self, step: StepSummary) -> None:
        self.last = step
        self._steps += 1
        for name, ns in _parts_ns(step):
            self._ns[name] += ns
        for name, number in step.counts.items():
            self._counts[name] += number

    def means(self) -> dict[str, float]:
        """Return seconds per step, and rates over all steps; empty without steps."""
        if self.last is None:
            return {}
        values = {name: ns / self._steps / 1e9 for name, ns in self._ns.items()}
        seconds = self._ns["step_seconds"] / 1e9
        for name in ("tokens", "samples"):
            if name in self._counts and seconds:
                values[f"{name}_per_second"] = self._counts[name] / seconds
        if self.last.device is not None:
            utilisation = mfu(self._counts["model_flops"], seconds, self.last.device.name)
            if utilisation is not None:
                values["mfu_ratio"] = utilisation
        return values


def _parts_ns(step: StepSummary) -> Iterator[tuple[str, int]]:
    """Yield the duration of a step and its parts that are not 0."""
    parts = {
        "step_seconds": step.duration_ns,
        **{f"compute_seconds/{phase}": ns for phase, ns in step.compute_ns.items()},
        **{f"exposed_seconds/{role}": ns for role, ns in step.exposed_ns.items()},
        "bubble_seconds": step.bubble_ns,
        "data_seconds": step.data_ns,
        "checkpoint_seconds": step.checkpoint_ns,
        "gc_seconds": step.gc_ns,
        "between_seconds": step.between_ns,
        "other_seconds": step.other_ns,
        "launch_bound_seconds": sum((step.launch_bound_ns or {}).values()),
    }
    return ((name, ns) for name, ns in parts.items() if ns)


class RankSeries:
    """Makes points and findings of a rank. Used by one thread."""

    def __init__(self, rank: LiveRank) -> None:
        self._rank = rank
        self._zeros: dict[str, float] = {}
        self._found: frozenset[tuple[int, str]] = frozenset()
        self._last_step = -1
        self._written_means: JobMeans | None = None

    def points(self, sums: StepSums) -> list[Point]:
        """Return the points for these steps; none without a step."""
        last, rank = sums.last, self._rank
        if last is None:
            return []
        means = sums.means()
        # A part that was there once is written as 0 where it is not: a curve that ends says something else.
        values = {**self._zeros, **means}
        self._zeros.update(dict.fromkeys((name for name in means if name.partition("/")[0].endswith("_seconds")), 0.0))
        if rank.score is not None:
            values["straggler_score_ratio"] = rank.score
        goodput = rank.budget.goodput(last.end_ns)
        if goodput is not None:
            values["goodput_ratio"] = goodput
        self._last_step = last.step
        ended = rank.epoch_ns(last.end_ns) / 1e9
        points = [Point(f"rank_{rank.rank}", last.step, ended, values)]
        return [*points, *self._points_of_job(rank.job, ended)]

    def _points_of_job(self, job: JobView | None, time: float) -> Iterator[Point]:
        if job is None or job.means is None or job.means is self._written_means:
            return
        means = self._written_means = job.means
        costs_ns = [finding.cost_ns or 0.0 for finding in job.findings if finding.kind == SLOW]
        seconds = {
            "step_seconds": means.step_ns,
            **{f"{_WORDS.get(word, word)}_seconds": ns for word, ns in means.work_ns.items()},
            **{f"exposed_seconds/{role}": ns for role, ns in means.exposed_ns.items()},
            **{f"lost_seconds/{lost.cause}": lost.cost_ns or 0.0 for lost in job.findings if lost.kind == LOST},
            "straggler_cost_seconds": max(costs_ns, default=0.0),
        }
        values = {name: ns / 1e9 for name, ns in seconds.items()}
        values["stragglers"] = float(len(costs_ns))
        yield Point(JOB, means.step, time, values)

    def findings(self) -> list[DatedEvent]:
        """Return the findings of the monitor since the last call."""
        events = () if self._rank.job is None else self._rank.job.events
        new = [
            DatedEvent(self._last_step, event) for event in events if (event.time_ns, event.sentence) not in self._found
        ]
        self._found = frozenset((event.time_ns, event.sentence) for event in events)
        return new
