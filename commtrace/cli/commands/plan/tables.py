"""What ``commtrace plan`` prints of a plan: memory, communication and the bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from commtrace.cli.output import binary_bytes, num_bytes, share
from commtrace.planning.alternatives import MOST_CHANGES, Alternative
from commtrace.planning.communication import Traffic
from commtrace.planning.layout import Layout
from commtrace.planning.memory import leaves_margin
from commtrace.planning.plan import Plan, StagePlan

if TYPE_CHECKING:
    from commtrace.interchange.megatron_issue_488 import ComparedNumber

GIB: Final = 1 << 30

_ZERO_ESTIMATE: Final = (
    "estimate: parameters exceed stage3_max_live_parameters or stage3_max_reuse_distance, so that ZeRO 3 gathers some "
    "of them again in the backward; all of them is the upper limit."
)


def verdict(planned: Plan, memory: float | None) -> str:
    """Return what the fullest GPU needs, and whether it fits into this memory, GiB."""
    fullest = planned.fullest
    peak_bytes = fullest.memory.peak_bytes
    of_stage = f" on stage {fullest.stage}" if planned.layout.pp > 1 else ""
    need = f"a GPU{of_stage} needs {binary_bytes(peak_bytes)}"
    if memory is None:
        return f"At its peak {need}."
    need += f" at its peak and has {memory:.4g} GiB"
    if peak_bytes > memory * GIB:
        return f"Does not fit: {need}."
    left = binary_bytes(memory * GIB - peak_bytes)
    if leaves_margin(peak_bytes, memory * GIB):
        return f"Fits: {need}, so that {left} are left."
    return f"Fits, but leaves only {left}: {need}. Leave a few GiB for what is not in it."


def print_plan(
    console: Console,
    planned: Plan,
    ignored: Sequence[str],
    changes: Sequence[Alternative],
    together: Sequence[Alternative],
    memory: float | None,
) -> None:
    """Print a plan.

    Args:
        ignored: Arguments of the job that were not used.
        changes: Changes that would need less memory.
        together: Several changes that need less than each of these.
        memory: Of a GPU, GiB.
    """
    layout = planned.layout
    console.print(
        f"{planned.parameters:,} parameters on {_counted(layout.world_size, 'GPU')} ({_divided(layout)}), "
        f"{_counted(layout.microbatches, 'microbatch', 'es')} of {layout.microbatch} × "
        f"{planned.model.sequence:,} tokens."
    )
    console.print(verdict(planned, memory), style="bold", markup=False)
    console.print("Not in it: the CUDA context, NCCL's buffers, workspaces and fragmentation.")
    model = planned.model
    if 0 < model.tokenizer_vocabulary < model.vocabulary:
        console.print(f"The vocabulary of {model.tokenizer_vocabulary:,} is padded to {model.vocabulary:,}.")
    for note in planned.notes:
        console.print(f"! {note}", markup=False)
    if ignored:
        console.print(f"Ignored: {' '.join(ignored)}", markup=False)
    _print_memory(console, planned.stages)
    _print_activations(console, planned.stages)
    _print_communication(console, planned)
    if layout.pp > 1:
        console.print(
            f"\nIdeal pipeline bubble: {share(planned.bubble.fraction_of_step)} of the step, "
            f"{share(planned.bubble.ratio_to_work)} of the work."
        )
    if changes:
        console.print("\nOne change that would need less memory")
        console.print(_alternatives(changes, memory))
    if together:
        _print_combinations(console, together, memory)


def _divided(layout: Layout) -> str:
    """Return ``tp 2 · dp 4``, and in DeepSpeed the stage of ZeRO."""
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep", "chunks")}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["not divided"]
    return " · ".join(parts if layout.zero_stage is None else [*parts, f"ZeRO {layout.zero_stage}"])


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{plural * (number != 1)}"


def _table(*columns: str, left: Sequence[str] = (), wrapped: str = "") -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_left = column in left or column == wrapped
        table.add_column(column, justify="left" if is_left else "right", no_wrap=column != wrapped)
    return table


def _print_memory(console: Console, stages: Sequence[StagePlan]) -> None:
    table = _table("stage", "ranks", "layers", "parameters", "gradients", "optimizer", "activations", "peak")
    for stage in stages:
        memory = stage.memory
        held = (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.activations_bytes)
        table.add_row(
            str(stage.stage),
            _numbers("", stage.ranks[0], stage.ranks[-1]),
            str(sum(map(len, stage.layers))),
            *map(binary_bytes, held),
            binary_bytes(memory.peak_bytes),
        )
    console.print("\nMemory of each GPU, by stage")
    console.print(table)


def _print_activations(console: Console, stages: Sequence[StagePlan]) -> None:
    parts = list(dict.fromkeys(part for stage in stages for part, _ in stage.memory.activations))
    table = _table("stage", *parts)
    for stage in stages:
        held = dict(stage.memory.activations)
        table.add_row(str(stage.stage), *(binary_bytes(held[part]) if part in held else "" for part in parts))
    console.print("\nActivations of each GPU at the peak, by part of the model")
    console.print(table)


def _print_communication(console: Console, planned: Plan) -> None:
    if not any(stage.traffic for stage in planned.stages):
        return
    for _, alike in groupby(planned.stages, key=lambda stage: stage.traffic):
        _print_traffic(console, list(alike), planned.layout)
    table = _table("role", "calls", "tensors", "on the wire", left=["role"])
    for total in planned.role_totals():
        table.add_row(total.role, f"{total.calls:,}", num_bytes(total.tensor_bytes), num_bytes(total.wire_bytes))
    console.print("\nCommunication of all GPUs in one iteration")
    console.print(table)
    table = _table("role", "groups", "ranks", "the first one", left=["role", "the first one"])
    for role, groups in planned.groups().items():
        table.add_row(role, str(len(groups)), str(len(groups[0])), _members(groups[0]))
    console.print("\nProcess groups")
    console.print(table)


def _numbers(what: str, first: int, last: int) -> str:
    """Return ``stage 3`` or ``stages 1–2``; without a word, only the numbers."""
    return f"{what} {first}".strip() if first == last else f"{what}s {first}–{last}" if what else f"{first}–{last}"


def _members(ranks: Sequence[int]) -> str:
    """Return the ranks of a group, of a large one the first and the last: ``0, 8, … 120``."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def _print_traffic(console: Console, stages: Sequence[StagePlan], layout: Layout) -> None:
    traffic = stages[0].traffic
    is_all_counted = all(row.basis == "counted" for row in traffic)
    words = ("role", "operation", "of", "when")
    columns = (*words, "count", "ranks", "each", "tensors", "on the wire", "basis")
    table = _table(*columns[: -1 if is_all_counted else None], left=[*words, "basis"], wrapped="of")
    for row in _joined(traffic):
        basis = () if is_all_counted else ("" if row.basis == "counted" else row.basis,)
        sizes = (row.bytes_per_call, row.tensor_bytes, row.wire_bytes)
        numbers = (f"{row.count:,}", str(row.group_size), *map(num_bytes, sizes))
        table.add_row(row.role, row.operation, row.what, row.when, *numbers, *basis)
    where = f" on {_numbers('stage', stages[0].stage, stages[-1].stage)}" if layout.pp > 1 else ""
    console.print(f"\nCommunication of each GPU{where} in one iteration")
    console.print(table)
    used = {row.basis for row in traffic}
    if "source" in used:
        console.print("source: read in Megatron-core, not counted on real ranks.")
    if "estimate" in used:
        console.print(
            _ZERO_ESTIMATE
            if layout.zero_stage is not None
            else "estimate: if tokens are divided evenly between experts."
        )


def _joined(traffic: Iterable[Traffic]) -> Iterator[Traffic]:
    """Yield calls that are alike once, such as the buckets of equal layers."""
    counts: Counter[Traffic] = Counter()
    for row in traffic:
        counts[replace(row, count=0)] += row.count
    for row, count in counts.items():
        yield replace(row, count=count)


def _alternatives(changes: Sequence[Alternative], memory: float | None) -> Table:
    columns = ("change", "peak") if memory is None else ("change", "peak", "")
    table = _table(*columns, left=["change", ""])
    for change in changes:
        table.add_row(
            change.change, binary_bytes(change.peak_bytes), *([] if memory is None else [_fit(change, memory)])
        )
    return table


def _print_combinations(console: Console, together: Sequence[Alternative], memory: float | None) -> None:
    if memory is None or together[0].peak_bytes <= memory * GIB:
        console.print("\nSeveral changes that together make it fit")
    else:
        console.print(f"\nEven {MOST_CHANGES} such changes together do not make it fit. The smallest peak")
    console.print(_alternatives(together, memory))


def _fit(change: Alternative, memory: float) -> str:
    if change.peak_bytes > memory * GIB:
        return "does not fit"
    if leaves_margin(change.peak_bytes, memory * GIB):
        return "fits"
    return f"fits, but leaves only {binary_bytes(memory * GIB - change.peak_bytes)}"


def print_compared(console: Console, compared: Sequence[ComparedNumber]) -> None:
    """Print numbers of another tool beside ours."""
    why = "what is wrong in the tool's, or differs"
    table = _table("", "number", "tool", "here", why, left=["", "number"], wrapped=why)
    for line in compared:
        is_bytes = line.unit == "bytes"
        numbers = (f"{number / GIB:,.1f} GiB" if is_bytes else f"{number:,}" for number in (line.tool, line.ours))
        quantity = line.quantity if is_bytes or line.quantity == line.unit else f"{line.quantity} {line.unit}"
        table.add_row(line.of, f"{quantity}{' bytes' * is_bytes}", *numbers, line.difference)
    console.print("\nBeside the analysis tool of Megatron-LM's issue 488")
    console.print(table)
