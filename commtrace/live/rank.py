"""The state of a running rank, for its exporters."""

from __future__ import annotations

import bisect
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from commtrace.analysis.breakdown.run_budget import PART_OF_KIND, PARTS, START, TRAINING, PartIntervals, divide
from commtrace.analysis.matching.stages import Flow, FlowFinder
from commtrace.live.monitoring.job_steps import JobStep
from commtrace.live.monitoring.waits import Split
from commtrace.live.own_cost import OwnCostMeter
from commtrace.trace import schema
from commtrace.trace.hang_report import HangReport
from commtrace.trace.inputs import MOST_RANKS
from commtrace.trace.marks import Marks, read_mark
from commtrace.trace.metadata import ClockAnchor, DeviceState, RankMetadata
from commtrace.trace.quiet import QuietChange
from commtrace.trace.run import PIPELINE, stage_in_groups
from commtrace.trace.schema import Row
from commtrace.trace.spans import RowBatch, Spans
from commtrace.trace.topology import Topology

if TYPE_CHECKING:
    from commtrace.analysis.communication.baseline import NetworkBaseline
    from commtrace.findings.finding import Finding
    from commtrace.findings.status import JobView, LiveEvent

KNOWN_PARTS: Final = ("training", "evaluation", "checkpoint", "loading", "start", "unknown")


class LiveBudget:
    """Divides the wall time of a process up to the end of its last step, as ``breakdown.run_budget`` does for a run.

    One process cannot know whether a restart lost steps, or how long it took. Not thread-safe.
    """

    def __init__(self) -> None:
        self._began_ns: int | None = None
        self._until_ns = 0
        self._ns = [0] * len(PARTS)
        self._pending: list[tuple[int, int, int]] = []
        self._ends_of_between: list[int] = []  # ascending: where the work of steps begins

    def add(self, rows: Iterable[Row], topology: Topology) -> None:
        """Take the rows of one pass. ``topology`` has the start of the process, and the recorded steps unless all."""
        spans = RowBatch.of(rows).columns
        self._ends_of_between += sorted(spans.end[spans.kind == schema.BETWEEN].tolist())
        spans = spans.take(np.isin(spans.kind, list(PART_OF_KIND)))
        times = zip(spans.kind.tolist(), spans.start.tolist(), spans.end.tolist(), strict=True)
        found = [
            (PART_OF_KIND[kind], self._work_begins(start, end) if kind == schema.STEP else start, end)
            for kind, start, end in times
        ]
        self._pending += found
        step_ends = [end for part, _, end in found if part == TRAINING]
        if step_ends:
            self._close(max(step_ends), topology)

    def _work_begins(self, start: int, end: int) -> int:
        """Return where the own work of a step begins, behind the time that the loop took between two steps."""
        count = bisect.bisect_right(self._ends_of_between, end)
        before = self._ends_of_between[:count]
        del self._ends_of_between[:count]
        return max(start, before[-1]) if before else start

    def _close(self, until_ns: int, topology: Topology) -> None:
        claims = [PartIntervals(part, np.array([start]), np.array([end])) for part, start, end in self._pending]
        first_ns = min(start for part, start, _ in self._pending if part == TRAINING)
        if self._began_ns is None:
            self._began_ns = self._until_ns = min(first_ns, topology.get("process_start_ns", first_ns))
            if "steps" not in topology.get("recording", {}):
                claims.append(PartIntervals(START, np.array([self._began_ns]), np.array([first_ns])))
        for part, time in enumerate(divide(claims, self._until_ns, max(until_ns, self._until_ns))):
            self._ns[part] += time
        self._until_ns = max(until_ns, self._until_ns)
        self._pending = [one for one in self._pending if one[2] > self._until_ns]

    def seconds(self) -> dict[str, float]:
        """Return the time of each part; the sum reaches from the start of the process to the end of its last step."""
        return {part: self._ns[PARTS.index(part)] / 1e9 for part in KNOWN_PARTS}

    def goodput(self, now_ns: int) -> float | None:
        """Return the share of training in the wall time up to ``now_ns`` (monotonic); None before a step ends."""
        if self._began_ns is None or now_ns <= self._began_ns:
            return None
        return self._ns[TRAINING] / (now_ns - self._began_ns)


_MOST_EVENTS: Final = 100

PEERS: Final = "peers"
"""The label that ranks share which do the same work, in a pipeline whose stages nobody told."""

MOST_READINGS: Final = 16
"""Limit of device readings between two windows."""


Hang = Callable[[], HangReport | None]
Phase = Callable[[], str]


class LiveRank:
    """A running rank. Written by the harvester thread; other threads may read."""

    def __init__(
        self,
        metadata: RankMetadata,
        directory: Path,
        hang: Hang = lambda: None,
        phase: Phase = lambda: "",
        end_first: Callable[[], None] = lambda: None,
        baseline: NetworkBaseline | None = None,
    ) -> None:
        self.metadata = metadata
        self.hang = hang  # returns the report of a hang; None while training goes on
        self.phase = phase  # returns checkpoint or evaluation during one, in which no step ends; else empty
        self.end_first = end_first  # ends the recording at the end of Python before the exit handlers registered so far
        self.baseline = baseline  # what the network was measured to carry; None if none is configured
        self.directory = directory
        self.marks = Marks()
        self.spans = 0  # rows so far, without marks
        self.dropped: Mapping[str, int] = {}  # spans so far, by kind
        self.overhead_ns = 0  # CPU time of the harvester thread so far
        self.joins = False  # the monitor on this rank joins the reports of all ranks
        self.findings: tuple[Finding, ...] = ()  # that hold; empty where the monitor does not join
        self.score: float | None = None  # own work as a multiple of what is typical of its stage; None if unknown
        self.job: JobView | None = None  # None where the monitor does not join and on ranks that do not ask
        self.asks_job = False  # set by an exporter that shows the job where the monitor does not join
        self.budget = LiveBudget()
        self.own_cost = OwnCostMeter()
        # the job's newest, by number and repetition; empty on ranks that do not ask
        self.job_steps: Mapping[tuple[int, int], JobStep] = {}
        self.split: Mapping[tuple[str, str], Split] = {}  # by operation and role, as far as the monitor knows
        self.events: deque[LiveEvent] = deque(maxlen=_MOST_EVENTS)  # the newest of the monitor
        self.flow = Flow()  # what messages say of its place in a pipeline, for when no framework tells it
        self.work_class = -1  # equal for ranks that do the same work, as the monitor found from messages; −1: not found
        self._flow_finder = FlowFinder()
        self._device_states: deque[DeviceState] = deque(maxlen=MOST_READINGS)

    @property
    def run_id(self) -> str:
        return self.metadata.run_id

    @property
    def rank(self) -> int:
        return self.metadata.rank

    @property
    def ranks_of_node(self) -> range | None:
        """Return the ranks on this rank's node; None if the launcher does not say."""
        size = self.marks.topology.get("ranks_per_node")
        first = self.rank - self.metadata.local_rank
        return range(first, first + size) if size else None

    @property
    def told_stage(self) -> int | None:
        """Return the pipeline stage as the framework or the groups tell it; None if neither does."""
        coordinates = self.marks.coordinates
        if PIPELINE in coordinates:
            return int(coordinates[PIPELINE])
        return stage_in_groups(self.rank, dict(self.marks.groups).values())

    @property
    def is_in_unknown_stage(self) -> bool:
        """Return whether its messages show a pipeline, but nobody which ranks do the same work."""
        return self.flow.is_fed and self.work_class < 0 and self.told_stage is None

    def follow(self, spans: Spans, names: Sequence[str]) -> None:
        """Take the rows of whole steps; ``names`` are the strings for their codes."""
        self._flow_finder.add(spans, names)
        self.flow = self._flow_finder.found

    def learn(self, mark: Row) -> None:
        """Take a row of kind ``mark``."""
        fact = read_mark(mark.name, mark.detail, most_ranks=MOST_RANKS)
        if isinstance(fact, QuietChange):  # not among the marks: there they would pile up
            self.own_cost.learn(fact)
        else:
            self.marks.read(mark.name, fact)
        if isinstance(fact, DeviceState):
            self._device_states.append(fact)

    def take_device_states(self) -> tuple[DeviceState, ...]:
        """Return the readings of the device since the last call. From one thread."""
        return tuple(self._device_states.popleft() for _ in range(len(self._device_states)))

    @property
    def anchor(self) -> ClockAnchor:
        """Return the newest pair of monotonic and wall clock."""
        anchors = self.marks.anchors
        return anchors[-1] if anchors else self.metadata.anchor

    def epoch_ns(self, monotonic_ns: int) -> int:
        """Return an instant of the monotonic clock as epoch nanoseconds, by the newest anchor."""
        return monotonic_ns + self.anchor.offset_ns

    def clock(self) -> tuple[int, int]:
        """Return the drift of the wall clock against the monotonic clock since the start, ns, and its error.

        The error is half the time of the newest reading.
        """
        first, newest = self.metadata.anchor, self.anchor
        moved = newest.offset_ns - first.offset_ns
        return moved, newest.bracket_ns // 2

    def identity(self) -> dict[str, str]:
        """Return the labels of this rank: run, rank, node, local rank, parallel coordinates or what stands for them."""
        metadata = self.metadata
        named = {
            "run_id": metadata.run_id,
            "rank": str(metadata.rank),
            "node": metadata.node,
            "local_rank": str(metadata.local_rank),
        }
        coordinates = {_label(name): str(at) for name, at in dict(self.marks.coordinates).items()}
        stage = self.told_stage
        if stage is not None:
            coordinates[PIPELINE] = str(stage)
        elif self.work_class >= 0:
            coordinates[PEERS] = str(self.work_class)
        return {**coordinates, **named}


def _label(name: str) -> str:
    # A label that Prometheus does not accept would cost all of them.
    word = re.sub(r"[^a-zA-Z0-9_]", "_", name).lstrip("_")
    return word if word and not word[0].isdigit() else f"dim_{word}"
