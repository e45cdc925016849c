"""The wall time of a run as a few lines above the mean step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commtrace.analysis.breakdown.run_budget import RunBudget
from commtrace.analysis.rank_words import seconds_in_words
from commtrace.cli.units import share

_WORDS: Final = {
    "training": "training steps",
    "repeated": "steps that were done again",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "loading": "loading data between steps",
    "start": "start",
    "restart": "restarts",
    "unknown": "not known",
}
_WORTH_A_WORD: Final = 0.001
_UNEVEN: Final = 1.2
"""Times the mean of all ranks: from this on the rank that has most of a part is named."""


def run_budget_lines(budget: RunBudget | None) -> Iterator[str]:
    """Yield what it says; nothing where only some steps were asked for."""
    if budget is None or not budget.job.wall_ns:
        return
    wall, parts = budget.job.wall_ns, budget.job.by_name()
    attempts = f" in {budget.attempts} attempts" if budget.attempts > 1 else ""
    yield (
        f"Whole run: {seconds_in_words(wall)}{attempts}, goodput {share(budget.goodput)} "
        "(training steps that were kept)"
    )
    for part, words in _WORDS.items():
        time_ns = parts[part]
        if time_ns >= _WORTH_A_WORD * wall:
            line = f"{share(time_ns, wall):>4}  {seconds_in_words(time_ns):>8}  {words}"
            yield f"  {line}{_most(budget, part)}"
    if budget.repeated_steps:
        yield f"  {budget.repeated_steps} steps were lost by a restart or rollback and done once more."
    elif budget.repeated_steps is None:
        yield "  Which steps were done once more is not known: nothing tells the program's own numbers."


def _most(budget: RunBudget, part: str) -> str:
    """`` (5.2 s on rank 0)`` where one rank has clearly more of it than the mean."""
    of_rank = {rank: parts.by_name()[part] for rank, parts in budget.ranks.items()}
    most = max(of_rank, key=lambda rank: of_rank[rank])
    if part not in ("evaluation", "checkpoint", "loading") or of_rank[most] < _UNEVEN * budget.job.by_name()[part]:
        return ""
    return f" (rank {most}: {seconds_in_words(of_rank[most])})"
