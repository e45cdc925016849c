"""A layout as arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commtrace.planning.layout import Layout


def megatron_arguments(layout: Layout) -> tuple[str, ...]:
    """Return the arguments of Megatron-LM that set this layout; those of the model and of training stay."""
    return tuple(_arguments(layout))


def _arguments(layout: Layout) -> Iterator[str]:
    sizes: Sequence[tuple[str, int, int]] = (
        ("--tensor-model-parallel-size", layout.tp, 0),
        ("--pipeline-model-parallel-size", layout.pp, 0),
        ("--context-parallel-size", layout.cp, 1),
        ("--expert-model-parallel-size", layout.ep, 1),
        ("--expert-tensor-parallel-size", layout.expert_tp, layout.tp),
        ("--num-virtual-stages-per-pipeline-rank", layout.chunks, 1),
        ("--decoder-first-pipeline-num-layers", layout.first_stage_layers, 0),
        ("--decoder-last-pipeline-num-layers", layout.last_stage_layers, 0),
        ("--micro-batch-size", layout.microbatch, 0),
        ("--global-batch-size", layout.microbatch * layout.microbatches * layout.dp, 0),
    )
    for name, size, usual in sizes:
        if size != usual:
            yield from (name, str(size))
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    if layout.distributed_optimizer:
        yield "--use-distributed-optimizer"
    if layout.recompute != "none":
        yield from ("--recompute-granularity", layout.recompute)
    if layout.recompute == "full":
        yield from ("--recompute-method", "uniform", "--recompute-num-layers", "1")
