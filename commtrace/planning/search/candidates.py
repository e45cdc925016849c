"""The layouts that a model may have on a number of GPUs with a global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final, Literal, NamedTuple

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model, padded

_LARGEST_MICROBATCH: Final = 16
_MOST_CHUNKS: Final = 8
_LAYERS_AROUND_EVEN: Final = 3
"""The first and the last stage have at most so many layers more or fewer than the mean."""

Recompute = Literal["none", "selective", "full"]


def fitting_model(model: Model, tp: int) -> Model:
    """Return the model with an embedding that tensor parallel ranks can divide, as Megatron-LM pads it."""
    return model if not model.vocabulary % tp else replace(model, vocabulary=padded(model.vocabulary, 128 * tp))


def candidates(
    model: Model, like: Layout, gpus: int, global_batch: int, cp: Sequence[int] = (), ep: Sequence[int] = ()
) -> Iterator[Layout]:
    """Yield the layouts of ``gpus`` with sizes that fit the model; all that is not searched is that of ``like``.

    Args:
        global_batch: Sequences of an iteration.
        cp: Context parallel sizes. Empty: that of ``like``.
        ep: Expert parallel sizes, likewise.

    Raises:
        ConfigurationError: what context or expert parallel ranks would exchange is not known.
    """
    _check_exchange(model, like, cp, ep)
    for context, expert in product(cp or (like.cp,), ep or (like.ep,)):
        if context not in (1, like.cp) and model.sequence % (2 * context):
            continue  # Megatron-LM halves the share of a cp rank once more, to balance causal attention
        for tp in divisors(gpus // context):
            for pp in divisors(gpus // (context * tp)):
                if gpus % (context * tp * pp) or pp > model.layers:
                    continue
                dp = gpus // (context * tp * pp)
                for microbatch in _microbatches(global_batch, dp):
                    sizes = _Sizes(tp, pp, dp, context, expert, microbatch, global_batch // (microbatch * dp))
                    yield from _of_sizes(model, like, sizes)


def _check_exchange(model: Model, like: Layout, cp: Sequence[int], ep: Sequence[int]) -> None:
    if set(cp) - {1, like.cp} and like.cp_communication == "other":
        raise ConfigurationError("the job exchanges keys and values in a way that a plan does not know: leave --cp out")
    if set(ep) - {1} and not model.experts:
        raise ConfigurationError("the model has no experts to divide: leave --ep out")
    if set(ep) - {1, like.ep} and like.expert_dispatcher == "other":
        raise ConfigurationError(
            "the job does not send its tokens to experts by all-to-all, and a plan knows nothing else: leave --ep out"
        )


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


class _Sizes(NamedTuple):
    """Those by which a layout differs from others, under its own names."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    microbatch: int
    microbatches: int


def _of_sizes(model: Model, like: Layout, sizes: _Sizes) -> Iterator[Layout]:
    recomputes: tuple[Recompute, ...] = ("none", "full") if like.flash_attention else ("none", "selective", "full")
    is_sequence_parallel = sizes.tp > 1 and (like.sequence_parallel or like.tp == 1)
    for chunks, first_stage_layers, last_stage_layers in divisions(model.layers, sizes.pp, sizes.microbatches):
        for recompute in recomputes:
            try:
                layout = replace(
                    like,
                    **sizes._asdict(),
                    expert_tp=0 if like.expert_tp == like.tp else like.expert_tp,
                    chunks=chunks,
                    first_stage_layers=first_stage_layers,
                    last_stage_layers=last_stage_layers,
                    sequence_parallel=is_sequence_parallel,
                    recompute=recompute,
                )
                layout.check(fitting_model(model, sizes.tp))
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
