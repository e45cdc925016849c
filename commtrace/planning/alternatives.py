"""Changes of a layout that need less memory, for a job that does not fit.

>>> [one.change for one in alternatives(plan)]  # doctest: +SKIP
['distributed optimizer', 'pp 4, dp 2', 'full recomputation']
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.memory import leaves_margin, stage_memory
from commtrace.planning.model import Model
from commtrace.planning.plan import Plan

MOST_CHANGES: Final = 5
_MOST_TP: Final = 8  # the GPUs of most nodes; between nodes tensor parallelism is too slow


class Alternative(NamedTuple):
    """A change of the layout, or several, for the same number of ranks and the same global batch."""

    change: str
    layout: Layout
    peak_bytes: int


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """Return the single changes of the layout that lower the peak memory of the fullest rank."""
    return tuple(_smaller(plan, _unchanged(plan)))


def combinations(plan: Plan, memory_bytes: float) -> tuple[Alternative, ...]:
    """Return the fewest changes that together leave a margin in a memory, those first that cost little or no time.

    They are without full recomputation, which repeats every forward, if that is possible; fewer changes with it stand
    behind. If nothing leaves a margin, the one with the smallest peak is returned.
    """
    reached = {plan.layout: _unchanged(plan)}
    level = list(reached.values())
    recomputing: tuple[Alternative, ...] = ()
    for _ in range(MOST_CHANGES):
        further = [alternative for before in level for alternative in _smaller(plan, before)]
        # The same changes in another order are the same layout. It keeps the last place, that of its costliest change:
        # changes that all cost little come before those of which one costs a lot.
        level = [
            alternative
            for alternative in reversed(dict.fromkeys(reversed(further)))
            if alternative.layout not in reached
        ]
        reached |= {alternative.layout: alternative for alternative in level}
        fitting = [alternative for alternative in level if leaves_margin(alternative.peak_bytes, memory_bytes)]
        without = [
            alternative
            for alternative in fitting
            if alternative.layout.recompute != "full" or plan.layout.recompute == "full"
        ]
        if without:
            return (without[0], *recomputing)
        recomputing = recomputing or tuple(fitting[:1])
    return recomputing or (min(reached.values(), key=lambda alternative: alternative.peak_bytes),)


def _unchanged(plan: Plan) -> Alternative:
    return Alternative("", plan.layout, plan.fullest.memory.peak_bytes)


def _smaller(plan: Plan, before: Alternative) -> Iterator[Alternative]:
    """Yield what one more change than those of ``before`` makes of a plan, if it needs less memory."""
    for fields in _changes(plan.model, before.layout):
        try:
            layout = replace(before.layout, **fields)
            layout.check(plan.model)
        except ConfigurationError:  # such as more tensor parallel ranks than heads, or experts on more ranks than exist
            continue
        peak_bytes = _peak_bytes(plan.model, layout)
        if peak_bytes < before.peak_bytes:
            yield Alternative(", ".join(_differences(plan.layout, layout)), layout, peak_bytes)


@cache  # the same changes in another order are the same layout
def _peak_bytes(model: Model, layout: Layout) -> int:
    return max(stage_memory(model, layout, stage).peak_bytes for stage in range(layout.pp))


def _changes(model: Model, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield changes of a layout's fields, those first that cost little or no time; not all of them are possible."""
    is_deepspeed = layout.zero_stage is not None
    if not layout.flash_attention:
        yield {"flash_attention": True}
    if not is_deepspeed and not layout.distributed_optimizer:
        yield {"distributed_optimizer": True}
    if is_deepspeed:
        yield from ({"zero_stage": stage} for stage in range((layout.zero_stage or 0) + 1, 4))
    if layout.tp > 1 and not layout.sequence_parallel:
        yield {"sequence_parallel": True}
    if layout.microbatch % 2 == 0:
        yield {"microbatch": layout.microbatch // 2, "microbatches": 2 * layout.microbatches}
    if layout.recompute == "none" and not layout.flash_attention:
        yield {"recompute": "selective"}
    if model.experts and not is_deepspeed:
        yield {"ep": 2 * layout.ep}
    if layout.dp % 2 == 0 and not (is_deepspeed and layout.is_data_parallel):
        yield from _divisions(model, layout)
    if layout.recompute != "full":
        yield {"recompute": "full"}


def _divisions(model: Model, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield changes that divide the model between twice as many ranks, and the batch between half as many."""
    halved: dict[str, Any] = {"dp": layout.dp // 2, "microbatches": 2 * layout.microbatches}
    if layout.zero_stage is None:
        yield {**halved, "pp": 2 * layout.pp}
    if layout.tp < _MOST_TP:
        expert_tp = 0 if layout.expert_tp == layout.tp else layout.expert_tp
        # Megatron-core trains experts on tensor parallel ranks with sequence parallelism only
        needs_sequence_parallelism = bool(model.experts) and layout.tp == 1
        sequence_parallel = layout.sequence_parallel or needs_sequence_parallelism
        yield {**halved, "tp": 2 * layout.tp, "expert_tp": expert_tp, "sequence_parallel": sequence_parallel}
    if layout.zero_stage is None:
        yield {**halved, "cp": 2 * layout.cp}


def _differences(before: Layout, after: Layout) -> Iterator[str]:
    """Yield what a layout changes, in words."""
    if after.flash_attention != before.flash_attention:
        yield "flash attention"
    if after.distributed_optimizer != before.distributed_optimizer:
        yield "distributed optimizer"
    if after.zero_stage != before.zero_stage:
        yield f"ZeRO stage {after.zero_stage}"
    for name in ("tp", "cp", "pp", "dp", "ep"):
        if getattr(after, name) != getattr(before, name):
            yield f"{name} {getattr(after, name)}"
    if after.sequence_parallel != before.sequence_parallel:
        yield "sequence parallelism"
    if after.microbatch != before.microbatch:
        yield f"microbatch of {after.microbatch}, {after.microbatches:,} microbatches"
    if after.recompute != before.recompute:
        yield f"{after.recompute} recomputation"
