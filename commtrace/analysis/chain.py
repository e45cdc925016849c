"""Analyse a run in one call: load, align, match, choose the steps, partition.

>>> analyse("commtrace-runs/my-run", steps="10:20").partition.total("bubble")  # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from commtrace.analysis.breakdown.partition import Partition, partition
from commtrace.analysis.clocks.align import Alignment
from commtrace.analysis.matched import Context, Matched, match_run
from commtrace.analysis.matching.coverage import RowCounts
from commtrace.analysis.matching.match import Matches
from commtrace.analysis.matching.roles import Roles, between_stages, select_roles
from commtrace.analysis.replay.observed_steps import ObservedSteps, WaitsBetweenStages
from commtrace.analysis.replay.program import Program, build_program
from commtrace.analysis.replay.step_statistics import TransferTable, WorkTable
from commtrace.analysis.steps.choice import ChosenSteps, StepChoice, rows_of_steps, select
from commtrace.trace.blocks import pick
from commtrace.trace.run import Run


class ReplayedRows(NamedTuple):
    """Rows of some steps, on one clock and matched, with what lasts into these steps."""

    run: Run
    matches: Matches
    roles: Roles


@dataclass(frozen=True)
class Analysis:
    """An analysed run. ``matches``, ``roles`` and ``partition`` are of ``run``."""

    recorded: Run  # everything that was loaded, as it was recorded
    run: Run  # on one clock, only the steps that count
    alignment: Alignment
    steps: StepChoice
    matches: Matches
    roles: Roles
    context: Context  # the steps that count with their neighbours
    steps_of_run: tuple[int, ...] | None = None  # of a window: all steps of its run that count

    @cached_property
    def partition(self) -> Partition:
        """Return the time of every step that counts by state; its ``stalled_ns`` are of the rows of the context."""
        context = self.context
        return partition(context.run, context.matches, context.roles, context.steps)

    @cached_property
    def replayed(self) -> ReplayedRows:
        """Return the rows for a replay of these steps."""
        if self.steps_of_run is None:
            return ReplayedRows(self.run, self.matches, self.roles)
        context = self.context
        rows = rows_of_steps(context.run, replace(self.steps, used=self.steps_of_run))
        run, matches = select(context.run, context.matches, rows)
        return ReplayedRows(run, matches, select_roles(context.roles, rows))

    @cached_property
    def program(self) -> Program:
        """Return the steps that count, ready to be replayed. Raise ReplayError if they cannot be."""
        return build_program(self.replayed.run, self.replayed.matches, np.array(self.steps.used, np.int64))

    @cached_property
    def work(self) -> WorkTable:
        """Return the work of the program. Raise ReplayError if there is none."""
        return WorkTable.of(self.program.segments)

    @cached_property
    def transfers(self) -> TransferTable:
        """Return the transfers of the program. Raise ReplayError if there is none."""
        return TransferTable.of(self.replayed.run, self.program.transfers)

    @cached_property
    def observed(self) -> ObservedSteps:
        """Return the model of the program. Raise ReplayError if there is none."""
        rows, stalls, transfers = self.replayed, self.program.stalls, self.program.transfers
        between = between_stages(rows.run, rows.roles)
        waits = WaitsBetweenStages(pick(between, stalls.rank, stalls.row), pick(between, transfers.rank, transfers.row))
        return ObservedSteps.of(rows.run, self.program, self.work, self.transfers, waits)

    @property
    def kept_model(self) -> ObservedSteps | None:
        """Return the model if a measurement has needed it."""
        return vars(self).get("observed")

    @cached_property
    def counts(self) -> dict[int, RowCounts]:
        """Return counts of all rows that were recorded, by rank."""
        counts: dict[int, RowCounts] = {}
        for block in self.recorded.blocks:
            counts |= RowCounts.of_block(block)
        return counts


def analyse(source: str | Path | Run | ChosenSteps, steps: str | None = None) -> Analysis:
    """Analyse a run. ``steps`` is ``A:B`` (B exclusive), ``A:B:k`` or ``A``; by default all but the first.

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
    """
    return analysis_of(match_run(source, steps))


def analysis_of(matched: Matched, steps_of_run: tuple[int, ...] | None = None) -> Analysis:
    """Analyse a matched run; ``steps_of_run`` as in :class:`Analysis`."""
    return Analysis(
        recorded=matched.recorded,
        run=matched.run,
        alignment=matched.alignment,
        steps=matched.steps,
        matches=matched.matches,
        roles=matched.roles,
        context=matched.context,
        steps_of_run=steps_of_run,
    )
