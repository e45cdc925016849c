"""The communication of DeepSpeed's ZeRO in one iteration, from the sizes of the parameter tensors.

The formulas are those that real ranks were counted to follow (DeepSpeed 0.19) with one group of data parallel ranks;
``basis`` marks the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from commtrace.planning.communication import GRADIENT_NORM, Basis, Traffic, When
from commtrace.planning.layout import Layout, ZeroOptions
from commtrace.planning.model import Model, padded
from commtrace.planning.parameters import stage_parameters

GATHERED_AGAIN: Final = "parameters, once more"

_ROLE: Final = "dp"
_START_ALIGNMENT: Final = 2  # elements, of each rank's part of the flat parameters
_STAGE_0_BUCKET: Final = 500_000_000  # elements; DeepSpeed has no option for it
_NORM_BYTES: Final = 4
_STAGE_3_NORM_BYTES: Final = 8  # accumulated in fp64, on devices that have it
_OVERFLOW_BYTES: Final = 1


class ZeroJob(NamedTuple):
    """A job of DeepSpeed whose ranks are all data parallel."""

    stage: int
    elements: tuple[int, ...]  # of every parameter tensor that is trained, in the order of the model
    ranks: int
    microbatches: int
    parameter_bytes: int = 2
    gradient_bytes: int = 2
    options: ZeroOptions = ZeroOptions()
    groups: tuple[int, ...] = ()  # the optimizer's group of every tensor; empty if there is one

    def of_groups(self) -> list[list[int]]:
        """Return the tensors of each group of the optimizer."""
        if not self.groups:
            return [list(range(len(self.elements)))]
        return [
            [tensor for tensor, group_of_tensor in enumerate(self.groups) if group_of_tensor == group]
            for group in sorted(set(self.groups))
        ]


def planned_zero_job(model: Model, layout: Layout) -> ZeroJob:
    """Return the job of a model in a layout whose ranks are all data parallel."""
    return ZeroJob(
        stage=layout.zero_stage or 0,
        elements=tuple(parameter.elements for parameter in stage_parameters(model, layout, 0)),
        ranks=layout.dp,
        microbatches=layout.microbatches,
        parameter_bytes=layout.parameter_bytes,
        gradient_bytes=layout.gradient_bytes,
        options=layout.zero,
    )


def zero_traffic(job: ZeroJob) -> tuple[Traffic, ...]:
    """Return the communication of each rank in one iteration."""
    parts = {0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3}[job.stage]
    return tuple(row for row in parts(job) if row.count) if job.ranks > 1 else ()


def _row(
    job: ZeroJob, operation: str, what: str, when: When, count: int, num_bytes: int, basis: Basis = "counted"
) -> Traffic:
    return Traffic(_ROLE, operation, what, when, count, num_bytes, job.ranks, basis)


def _stage_0(job: ZeroJob) -> Iterator[Traffic]:
    filled = 0
    for position, elements in enumerate(job.elements, 1):
        filled += elements
        if filled > _STAGE_0_BUCKET or position == len(job.elements):
            yield _row(job, "all_reduce", "gradients", "backward", 1, job.gradient_bytes * filled)
            filled = 0


def _stages_1_and_2(job: ZeroJob) -> Iterator[Traffic]:
    options = job.options
    # In ZeRO 2 hooks reduce a gradient as soon as it is there; ZeRO 1 does it in the order of the model, once.
    in_backward_order = job.stage == 2 or options.overlap_comm
    passes = job.microbatches if job.stage == 2 else 1
    order = [tensor for group in job.of_groups() for tensor in group]
    if in_backward_order:
        order = list(reversed(range(len(job.elements))))
    for bucket in _buckets(job.elements, order, options.reduce_bucket_size):
        if options.reduce_scatter and not options.use_multi_rank_bucket_allreduce:
            for elements in _of_owners(job, bucket).values():
                yield _row(job, "reduce", "gradients", "backward", passes, job.gradient_bytes * elements)
            continue
        size = job.gradient_bytes * sum(job.elements[tensor] for tensor in bucket)
        yield _row(job, "all_reduce", "gradients", "backward", passes, size)
    yield _row(job, "all_reduce", "overflow", "step", int(options.check_overflow), _OVERFLOW_BYTES)
    yield _row(job, "all_reduce", GRADIENT_NORM, "step", len(job.of_groups()), _NORM_BYTES)
    for group in job.of_groups():
        flat = padded(sum(job.elements[tensor] for tensor in group), _START_ALIGNMENT * job.ranks)
        yield _row(job, "all_gather", "parameters", "step", 1, job.parameter_bytes * flat)


def _of_owners(job: ZeroJob, bucket: Iterable[int]) -> Counter[int]:
    """Return how many elements of a bucket each rank owns: the flat parameters of a group are divided evenly."""
    wanted = set(bucket)
    owned: Counter[int] = Counter()
    for group in job.of_groups():
        sizes = [job.elements[tensor] for tensor in group]
        part = padded(sum(sizes), _START_ALIGNMENT * job.ranks) // job.ranks
        for tensor, (begin, end) in zip(group, pairwise(accumulate(sizes, initial=0)), strict=True):
            while tensor in wanted and begin < end:
                stop = min(end, (begin // part + 1) * part)
                owned[begin // part] += stop - begin
                begin = stop
    return owned


def _stage_3(job: ZeroJob) -> Iterator[Traffic]:
    options, m = job.options, job.microbatches
    persistent = [elements for elements in job.elements if elements <= options.stage3_param_persistence_threshold]
    sharded = [elements for elements in job.elements if elements > options.stage3_param_persistence_threshold]
    stays_live = sum(sharded) <= min(options.stage3_max_live_parameters, options.stage3_max_reuse_distance)
    basis: Basis = "counted" if stays_live else "estimate"
    for gathered in _gathers(sharded, options.stage3_prefetch_bucket_size):
        size = job.parameter_bytes * sum(padded(elements, job.ranks) for elements in gathered)
        yield _row(job, "all_gather", "parameters", "forward", m, size, basis)
        if not stays_live:
            yield _row(job, "all_gather", GATHERED_AGAIN, "backward", m, size, basis)
    operation = "reduce_scatter" if options.reduce_scatter else "all_reduce"
    for bucket in _buckets(job.elements, list(reversed(range(len(job.elements)))), options.reduce_bucket_size):
        size = job.gradient_bytes * sum(padded(job.elements[tensor], job.ranks) for tensor in bucket)
        yield _row(job, operation, "gradients", "backward", m, size)
    yield _row(job, "all_reduce", GRADIENT_NORM, "step", len(job.of_groups()), _STAGE_3_NORM_BYTES)
    for elements, count in sorted(Counter(persistent).items()):
        size = job.parameter_bytes * padded(elements, job.ranks)
        yield _row(job, "all_gather", "persistent parameters", "step", count, size)


def _buckets(elements: Sequence[int], order: Iterable[int], largest: int) -> Iterator[list[int]]:
    """Yield the tensors of each bucket: one that would not fit begins the next bucket."""
    bucket: list[int] = []
    filled = 0
    for tensor in order:
        if bucket and filled + elements[tensor] > largest:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += elements[tensor]
    if bucket:
        yield bucket


def _gathers(elements: Iterable[int], enough: int) -> Iterator[list[int]]:
    """Yield what is gathered together: tensors in the order of their use, until there are enough elements."""
    gathered: list[int] = []
    for num_elements in elements:
        gathered.append(num_elements)
        if sum(gathered) >= enough:
            yield gathered
            gathered = []
    if gathered:
        yield gathered
