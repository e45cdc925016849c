"""Load the steps that a user asked for, and their neighbours: communication begins in one step and ends in another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from commtrace.analysis.steps.choice import contiguous
from commtrace.analysis.steps.inference import infer_steps
from commtrace.errors import ConfigurationError
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from commtrace.trace.selection import StepRange


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps of a run."""

    recorded: Run
    context: Run  # with a step on either side, where communication may end or have another number
    wanted: StepRange | None = None  # None for all

    @classmethod
    def of(cls, context: Run, wanted: StepRange) -> Window:
        """Return these steps of a run that was loaded with their neighbours."""
        return cls(_selected(context, wanted), context, wanted)


def load_window(source: str | Path | Run, steps: str | None = None) -> Window:
    """Load the steps asked for from a run directory, or take them from a loaded run.

    Args:
        steps: ``A:B`` (B exclusive), ``A:B:k`` or ``A``; None for all.

    Raises:
        RunNotFoundError: nothing was recorded there.
        ConfigurationError: ``steps`` cannot be parsed, or none of them was recorded.
    """
    if steps is None:
        run = _with_steps(source if isinstance(source, Run) else load_run(source))
        return Window(run, run)
    wanted = StepRange.parse(steps)
    around = StepRange(wanted.first - 1, wanted.end + 1)
    if isinstance(source, Run):
        source = _with_steps(source)
    context = _selected(source, around) if isinstance(source, Run) else load_run(source, around)
    window = Window.of(context, wanted)
    if not recorded_steps(window.recorded) and not isinstance(source, Run):
        # Nothing of these steps was recorded, or nothing marked steps: then they follow from the whole run.
        whole = _with_steps(load_run(source))
        if whole.steps_inferred:
            return load_window(whole, steps)
    if not recorded_steps(window.recorded):
        raise ConfigurationError(f"no step in {steps}; {_what_is_recorded(source)}")
    return window


def _with_steps(run: Run) -> Run:
    return infer_steps(run) or run


def _selected(run: Run, steps: StepRange) -> Run:
    ranks = {
        rank: replace(trace, spans=trace.spans.take(contiguous(steps.mask(trace.spans.step))))
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def recorded_steps(run: Run) -> list[int]:
    """Return the numbers of the steps that any rank has recorded, ascending."""
    of_ranks = [trace.spans.step[trace.spans.kind == schema.STEP] for trace in run.ranks.values()]
    return [int(step) for step in np.unique(np.concatenate(of_ranks))] if of_ranks else []


def _what_is_recorded(source: str | Path | Run) -> str:
    steps = recorded_steps(source if isinstance(source, Run) else load_run(source))
    if not steps:
        return "the run has no steps at all. Mark them with `with commtrace.step(i):`"
    return f"recorded are {steps[0]}–{steps[-1]}" if len(steps) > 1 else f"recorded is only {steps[0]}"
