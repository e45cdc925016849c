"""Say which engine recorded: the native part, in C, or the same in Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from commtrace.findings.formatting import format_ranks
from commtrace.trace.run import RankTrace, Run

_WORDS: Final = {"native": "native", "python": "Python"}

COST: Final = (
    "on an H100 it added 55 µs of the host's time to each synchronous and 90 µs to each asynchronous communication "
    "(docs/overhead.md)"
)
"""Of the Python engine."""


class EngineUse(NamedTuple):
    """An engine that recorded, why it was not the native one (empty if it was), and its ranks."""

    name: str
    reason: str
    ranks: tuple[int, ...]


def engines_used(run: Run) -> tuple[EngineUse, ...]:
    """Return the engines that recorded a run, by their first rank; none of ranks that do not say."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, trace in sorted(run.ranks.items()):
        if trace.engine is not None:
            ranks.setdefault((trace.engine["name"], trace.engine["reason"]), []).append(rank)
    return tuple(EngineUse(name, reason, tuple(own)) for (name, reason), own in ranks.items())


def engine_words(engines: Sequence[EngineUse], *, with_reason: bool = True) -> str:
    """Return ``native``, or ``native on ranks 0–3, Python on ranks 4–7 (it was not built …)``; empty if unknown."""
    if not with_reason:
        engines = list(_without_reasons(engines))
    parts = [
        _WORDS.get(engine.name, engine.name)
        + (f" on {format_ranks(engine.ranks)}" if len(engines) > 1 else "")
        + (f" ({engine.reason})" if engine.reason else "")
        for engine in engines
    ]
    return ", ".join(parts)


def engine_notes(engines: Iterable[EngineUse], traces: Iterable[RankTrace]) -> Iterator[str]:
    """Yield what it costs that the native engine did not record, for ranks on GPUs."""
    gpus = {trace.rank for trace in traces if is_gpu(trace.metadata.device)}
    for engine in engines:
        ranks = gpus.intersection(engine.ranks)
        if engine.reason and ranks:
            yield (
                f"The Python engine recorded {format_ranks(ranks)}: {COST}. Why not the native one: {engine.reason}."
            )


def _without_reasons(engines: Iterable[EngineUse]) -> Iterator[EngineUse]:
    ranks: dict[str, list[int]] = {}
    for engine in engines:
        ranks.setdefault(engine.name, []).extend(engine.ranks)
    for name, own in ranks.items():
        yield EngineUse(name, "", tuple(own))


def on_gpu(run: Run) -> bool:
    """Return whether the job ran on GPUs, as far as was recorded."""
    return is_gpu(run.any_metadata.device)


def is_gpu(device: str) -> bool:
    """Return whether the name of a rank's device is that of a GPU."""
    return bool(device) and not device.endswith("cpu") and not device.startswith("simulated")
