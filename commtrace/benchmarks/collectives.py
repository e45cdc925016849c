"""Measure the bandwidth of collectives by operation, group and size.

Every iteration begins with a barrier of the group. It is an all-reduce of one number, by which a member that is asked
to stop takes the others with it: what was measured until then is reported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.distributed as dist

from commtrace.analysis.communication.baseline import MeasuredSpread, Measurement, NetworkBaseline
from commtrace.benchmarks.device import nccl_version, timed_iterations
from commtrace.benchmarks.groups import Round
from commtrace.benchmarks.job import BenchmarkError, BenchmarkJob
from commtrace.benchmarks.operations import buffer_bytes, make_call, members, tensor_elements

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REFUSED: Final = re.compile(r"not (yet )?(support|implement)|unsupported|does not support", re.IGNORECASE)


class Settings(NamedTuple):
    """What to measure, and how often."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    warmup: int
    iterations: int
    dtype: str = ""  # by default bfloat16 on a GPU and float32 on a CPU
    seconds: float = float("inf")  # a size that has taken so long gets no further iterations


@dataclass(slots=True)
class Results:
    """What was measured so far, and sentences on what was not."""

    made: dict[str, str]
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_stopped: bool = False

    def baseline(self) -> NetworkBaseline:
        return NetworkBaseline(self.made, tuple(self.measurements))


class _RankTimes(NamedTuple):
    """What one rank measured of one operation and size."""

    times_ns: list[int]
    refused: str = ""
    is_stopped: bool = False


def environment(job: BenchmarkJob) -> dict[str, str]:
    """Return where a measurement was made."""
    nccl = {"nccl": nccl_version()} if job.backend == "nccl" else {}
    return {
        "backend": job.backend,
        "device": job.device_name,
        "torch": torch.__version__,
        **nccl,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def measure_collectives(
    job: BenchmarkJob,
    rounds: Sequence[Round],
    settings: Settings,
    results: Results,
    report: Callable[[Measurement], None] = lambda _: None,
) -> None:
    """Add the measurements of all rounds to the results, the same on all ranks.

    Args:
        report: is given every measurement as soon as it is made.

    Raises:
        BenchmarkError: a rank or the network failed.
    """
    dtype: torch.dtype = getattr(torch, settings.dtype or ("bfloat16" if job.device.type == "cuda" else "float32"))
    most_bytes = job.most_bytes()
    for each in rounds:
        for measurement in _measure_round(job, each, settings, dtype, most_bytes, results):
            results.measurements.append(measurement)
            report(measurement)
        if results.is_stopped:
            return


def _measure_round(
    job: BenchmarkJob, each: Round, settings: Settings, dtype: torch.dtype, most_bytes: int, results: Results
) -> Iterator[Measurement]:
    # All ranks make all groups: torch numbers them by the order of the calls.
    groups = {ranks: _new_group(ranks) for ranks in each.groups}
    for operation in settings.operations:
        for size in settings.sizes:
            if not _fits(operation, size, each, most_bytes, results):
                break
            times_of_rank = _RankTimes([])
            for ranks, group in groups.items():
                if job.rank in members(operation, ranks):
                    times_of_rank = _measure_own(job, operation, size, ranks, group, settings, dtype)
            everyone = job.gather(times_of_rank)
            for ranks in each.groups:
                taking = members(operation, ranks)
                times = [everyone[rank].times_ns for rank in taking]
                if all(times):
                    elements = tensor_elements(operation, size, len(ranks), dtype.itemsize)
                    num_bytes = elements * dtype.itemsize
                    yield _measurement(job, each.word, operation, taking, num_bytes, dtype, times)
            results.is_stopped = any(rank_times.is_stopped for rank_times in everyone)
            if results.is_stopped:
                return
            refused = next((rank_times.refused for rank_times in everyone if rank_times.refused), "")
            if refused:
                _note(results, f"{operation} was not measured: {refused}")
                break
    for group in groups.values():
        if group is not None:
            dist.destroy_process_group(group)


def _new_group(ranks: Sequence[int]) -> ProcessGroup | None:
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def _note(results: Results, sentence: str) -> None:
    if sentence not in results.notes:
        results.notes.append(sentence)


def _fits(operation: str, size: int, each: Round, most_bytes: int, results: Results) -> bool:
    needed = max(buffer_bytes(operation, size, len(ranks)) for ranks in each.groups)
    if needed > most_bytes:
        _note(
            results,
            f"{operation} was not measured from {size:,} bytes on: a rank would need {needed:,} bytes, and has "
            f"{most_bytes:,} for it.",
        )
    return needed <= most_bytes


def _measure_own(
    job: BenchmarkJob,
    operation: str,
    size: int,
    ranks: Sequence[int],
    group: ProcessGroup | None,
    settings: Settings,
    dtype: torch.dtype,
) -> _RankTimes:
    assert group is not None
    taking = members(operation, ranks)
    elements = tensor_elements(operation, size, len(ranks), dtype.itemsize)
    agreed = torch.zeros(1, dtype=torch.int32, device=job.device)
    started = time.monotonic()
    try:
        call = make_call(operation, elements, taking, group, dtype, job.device)

        def goes_on() -> bool:
            """Barrier of those who take part; the largest number wins: 2 stops the job, 1 this size."""
            late = time.monotonic() - started > settings.seconds
            agreed.fill_(2 if job.stop.is_requested else 1 if late else 0)
            if len(taking) == len(ranks):
                dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
            else:
                _exchange(agreed, taking, group)
            return int(agreed.item()) == 0

        times = timed_iterations(call, job.device, settings.warmup, settings.iterations, goes_on)
    except (RuntimeError, ValueError) as error:
        if _REFUSED.search(str(error)):
            return _RankTimes([], refused=f"{job.backend} of torch {torch.__version__} refuses it.")
        raise BenchmarkError(
            f"rank {job.rank} failed in {operation} of {size:,} bytes on ranks {list(taking)}: {error}"
        ) from error
    return _RankTimes(times, is_stopped=int(agreed.item()) == 2)


def _exchange(agreed: torch.Tensor, pair: Sequence[int], group: ProcessGroup) -> None:
    """Give both of two members of a larger group the larger number."""
    sent, received = agreed.clone(), torch.empty_like(agreed)
    peer = pair[1] if dist.get_rank() == pair[0] else pair[0]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    )
    for work in works:
        work.wait()
    torch.maximum(agreed, received, out=agreed)


def _measurement(
    job: BenchmarkJob,
    group: str,
    operation: str,
    ranks: tuple[int, ...],
    num_bytes: int,
    dtype: torch.dtype,
    times: Sequence[Sequence[int]],
) -> Measurement:
    # The call is over when its last member is. After an interruption a member may have one iteration more.
    longest = [max(of_members) for of_members in zip(*times, strict=False)]
    return Measurement(
        operation=operation,
        ranks=ranks,
        nodes=tuple(dict.fromkeys(job.nodes[rank] for rank in ranks)),
        num_bytes=num_bytes,
        dtype=str(dtype).removeprefix("torch."),
        iterations=len(longest),
        duration_ns=MeasuredSpread(sum(longest) / len(longest), min(longest), max(longest)),
        group=group,
    )
