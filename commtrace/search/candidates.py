"""The layouts that a model may have on a number of GPUs with a global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model

_LARGEST_MICROBATCH: Final = 16
_MOST_CHUNKS: Final = 8
_LAYERS_AROUND_EVEN: Final = 3
"""The first and the last stage have at most so many layers more or fewer than the mean."""

Recompute = Literal["none", "selective", "full"]


def fitting_model(model: Model, tp: int) -> Model:
    """Return the model with an embedding that tensor parallel ranks can divide, as Megatron-LM pads it."""
    unit = 128 * tp
    return model if not model.vocabulary % tp else replace(model, vocabulary=-(-model.vocabulary // unit) * unit)


def candidates(model: Model, like: Layout, gpus: int, global_batch: int) -> Iterator[Layout]:
    """Yield the layouts of ``gpus`` with sizes that fit the model; cp, ep and all else are those of ``like``.

    Args:
        global_batch: Sequences of an iteration.
    """
    for tp in divisors(gpus // like.cp):
        for pp in divisors(gpus // (like.cp * tp)):
            if gpus % (like.cp * tp * pp) or pp > model.layers:
                continue
            dp = gpus // (like.cp * tp * pp)
            for microbatch in _microbatches(global_batch, dp):
                yield from _of_sizes(model, like, tp, pp, dp, microbatch, global_batch // (microbatch * dp))


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _microbatches(global_batch: int, dp: int) -> list[int]:
    sizes = []
    size = 1
    while size <= _LARGEST_MICROBATCH:
        if global_batch % (size * dp) == 0:
            sizes.append(size)
        size *= 2
    return sizes


def _of_sizes(
    model: Model, like: Layout, tp: int, pp: int, dp: int, microbatch: int, microbatches: int
) -> Iterator[Layout]:
    recomputes: tuple[Recompute, ...] = ("none", "full") if like.flash_attention else ("none", "selective", "full")
    is_sequence_parallel = tp > 1 and (like.sequence_parallel or like.tp == 1)
    for chunks, first_stage_layers, last_stage_layers in divisions(model.layers, pp, microbatches):
        for recompute in recomputes:
            try:
                layout = replace(
                    like,
                    tp=tp,
                    pp=pp,
                    dp=dp,
                    expert_tp=0 if like.expert_tp == like.tp else like.expert_tp,
                    chunks=chunks,
                    first_stage_layers=first_stage_layers,
                    last_stage_layers=last_stage_layers,
                    microbatch=microbatch,
                    microbatches=microbatches,
                    sequence_parallel=is_sequence_parallel,
                    recompute=recompute,
                )
                layout.check(fitting_model(model, tp))
            except ConfigurationError:  # such as more tensor parallel ranks than heads
                break
            yield layout


def divisions(layers: int, pp: int, microbatches: int) -> Iterator[tuple[int, int, int]]:
    """Yield chunks, and the layers of the first and the last stage, 0 for as many as the others."""
    if layers % pp == 0:
        yield 1, 0, 0
        for chunks in range(2, min(_MOST_CHUNKS, layers // pp) + 1):
            if pp > 1 and layers // pp % chunks == 0 and microbatches % pp == 0:
                yield chunks, 0, 0
    if pp == 1:
        return
    even = layers / pp
    near = [size for size in range(1, layers) if abs(size - even) <= _LAYERS_AROUND_EVEN]
    for first in near:
        for last in near:
            others = layers - first - last
            if (pp == 2 and others == 0 and first != last) or (
                pp > 2 and others >= pp - 2 and others % (pp - 2) == 0 and {first, last} != {others // (pp - 2)}
            ):
                yield 1, first, last
