"""Selects the rows, steps and ranks to export; equal on all ranks, so that each can compute links to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from commtrace.config import Config
from commtrace.options import OTLP_LEVELS
from commtrace.trace import schema
from commtrace.trace.schema import Row
from commtrace.trace.selection.step_range import StepRange

_ADDED_BY: Final[Mapping[str, frozenset[int]]] = {
    "none": frozenset(),
    "steps": frozenset({schema.STEP}),
    "phases": frozenset(
        {
            schema.FORWARD,
            schema.BACKWARD,
            schema.RECOMPUTE,
            schema.OPTIMIZER,
            schema.DATA,
            schema.CHECKPOINT,
            schema.GC,
            schema.EVALUATION,
            schema.USER,
            schema.PHASE,
        }
    ),
    "communication": frozenset({schema.COLLECTIVE, schema.P2P, schema.STALL}),
    "modules": frozenset({schema.MODULE}),
}


@dataclass(frozen=True)
class SpanFilter:
    """The rows that become spans: steps that are multiples of ``every``, of the ranks in ``ranges``, empty for all."""

    level: str = "phases"
    every: int = 1
    ranges: tuple[StepRange, ...] = ()
    world_size: int = 1

    @classmethod
    def from_config(cls, config: Config, world_size: int) -> SpanFilter:
        ranges = tuple(StepRange.parse(part) for part in config.otlp.ranks.split(",") if part.strip())
        return cls(config.otlp.level, config.otlp.sample, ranges, world_size)

    @cached_property
    def kinds(self) -> frozenset[int]:
        levels = OTLP_LEVELS[: OTLP_LEVELS.index(self.level) + 1]
        return frozenset[int]().union(*(_ADDED_BY[level] for level in levels))

    @cached_property
    def first_rank(self) -> int:
        """Return the lowest rank that exports, which also exports the job steps; −1 without any."""
        return next((rank for rank in range(self.world_size) if self.takes_rank(rank)), -1)

    def takes_rank(self, rank: int) -> bool:
        return not self.ranges or any(rank in ranks for ranks in self.ranges)

    def takes_step(self, step: int) -> bool:
        return step % self.every == 0

    def rows(self, rows: Sequence[Row], step: int) -> list[Row]:
        """Return the rows of a closed step that become spans; ``step`` is also the step of rows without one."""
        kinds = self.kinds
        if self.every == 1:
            return [row for row in rows if row.kind in kinds]
        return [row for row in rows if row.kind in kinds and self.takes_step(step if row.step < 0 else row.step)]
