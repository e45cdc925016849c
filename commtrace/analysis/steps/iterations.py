"""Say how many iterations of a training loop the steps hold that were found in it."""

from __future__ import annotations

from collections.abc import Sequence

from commtrace.trace.run import Run
from commtrace.trace.topology import Iterations


def iterations_in_steps(run: Run) -> str | None:
    """Return a sentence if some steps hold more than one iteration; None if they do not, or nothing is known."""
    known = {rank: trace.topology["iterations"] for rank, trace in run.ranks.items() if "iterations" in trace.topology}
    if not known:
        return None
    facts = list(known.values())
    sentences = []
    later = [bounds for each in facts for bounds in (each["fewest"], each["most"]) if bounds]
    if max(later, default=1) > 1:
        sentences.append(
            f"A step holds {_range(later)} iterations: it ends when every optimizer has stepped ({_updates(facts)})."
        )
    first = [each["first"] for each in facts]
    if max(first) > max(later, default=1):
        sentences.append(
            f"The first step holds {_range(first)} iterations: until then it was not known which optimizers step."
        )
    if sentences and (len(known) < len(run.ranks) or any(each != facts[0] for each in facts)):
        sentences.append("Ranks differ in this.")
    return " ".join(sentences) or None


def _range(counts: Sequence[int]) -> str:
    fewest, most = min(counts), max(counts)
    return str(most) if fewest == most else f"{fewest} to {most}"


def _updates(facts: Sequence[Iterations]) -> str:
    names = dict.fromkeys(name for each in facts for name in each["updates"])
    bounds = {name: [n for each in facts for n in each["updates"].get(name, ())] for name in names}
    return ", ".join(f"{name} {_range(counts)} time{'s' * (max(counts) > 1)}" for name, counts in bounds.items())
