"""One look at a running job: what ``commtrace top`` draws, and its JSON. What is not known is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from commtrace.trace.json_values import JsonObject

PARTS: Final = ("compute", "exposed", "bubble", "data", "checkpoint", "gc", "memory", "idle", "other")
"""What a step divides into; they add up to it. ``memory`` and ``idle`` are known of imported kernels only."""

MOST_STEPS: Final = 20
"""So many of the newest steps are shown where nothing else is wished."""

URGENT: Final = ("SILENT", "NO STEP", "STOPPED")
"""How notes begin that cannot wait until the morning."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """Standing still for communication of one role; ns per step.

    Attributes:
        total_ns: all of it.
        wait_ns, transfer_ns: before and after the last participant had arrived; None where one rank alone told.
    """

    total_ns: int
    wait_ns: int | None = None
    transfer_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank; times are ns per step, the mean of the steps shown.

    Attributes:
        rank: −1 where a metrics endpoint does not say whose it is.
        host: its node; empty if unknown.
        where: its position in the parallel dimensions, such as ``pp1 dp0``.
        step_ns: None where no step is known.
        parts: by the words of ``PARTS``; empty where no step was recorded in detail.
        exposed: by role.
        waits_for: the rank for which it waited longest; None if for nobody, or not known.
        waits_ns: for that one.
        blame_ns: how long all others waited for this one.
        last_step: −1 before the first.
        age_ns: since its last word; None if not known.
        state: ``running``, ``silent``, ``ended`` or ``stopped``; empty if not known.
        dropped: spans that were lost: all in metrics, those of the steps shown in files.
    """

    rank: int
    host: str = ""
    where: str = ""
    step_ns: int | None = None
    parts: Mapping[str, int] = field(default_factory=dict)
    exposed: Mapping[str, Exposed] = field(default_factory=dict)
    waits_for: int | None = None
    waits_ns: int | None = None
    blame_ns: int | None = None
    last_step: int = -1
    age_ns: int | None = None
    state: str = ""
    dropped: int | None = None


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that holds up the others.

    Attributes:
        rank: −1 where the cause moves between ranks.
        host: its node.
        place, cause: where and why, as a verdict has them; metrics tell no more than ``slow`` or ``own work``.
        cost_ms_per_step: None where the source does not tell it.
        since: epoch seconds, of the monitor.
        evidence: a sentence with the numbers.
        told_by: ``steps shown``, ``monitor``, both, ``metrics`` or ``alert``.
        who: the same as ``commtrace straggler`` names it: ranks, a host or a stage with its ranks, or that it moves.
        others: slow ranks that it names beside ``rank``.
    """

    rank: int
    host: str
    place: str
    cause: str
    cost_ms_per_step: float | None
    evidence: str
    told_by: str
    who: str
    since: float | None = None
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """One look.

    Attributes:
        source: the run directory or address.
        time_ns: epoch ns of the look.
        run_id: empty if not known.
        world_size: ranks of the job; None if not known.
        hosts: how many; None if not known.
        first_step, last_step: of the steps that are shown; None where nobody knows them.
        num_steps: how many they are; the parts are means over them. 0: none.
        step_ns: median of the steps shown, over all ranks.
        before_ns: the same of the run so far; None where it is not known.
        before: what that is a median of.
        ranks: by rank.
        stragglers: dearest first.
        abstentions: what could not be judged, and why.
        notes: what else there is to know, most urgent first.
        took_ns: how long it took to find all of this.
    """

    source: str
    time_ns: int
    run_id: str = ""
    world_size: int | None = None
    hosts: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    num_steps: int = 0
    step_ns: int | None = None
    before_ns: int | None = None
    before: str = ""
    ranks: tuple[RankRow, ...] = ()
    stragglers: tuple[Slow, ...] = ()
    abstentions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    took_ns: int = 0

    def to_json(self) -> JsonObject:
        """Return the frame as JSON can hold it."""
        return asdict(self)
