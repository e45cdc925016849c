"""The Megatron example again and again, each time with one thing made slow on purpose and recorded as a run of its own.

Arguments: a folder, the causes, each of which gets a run below it, and behind -- the example's own options. A cause is
followed by its number of iterations: host=12. Ranks 0 and 1 are the replicas of stage 0, ranks 2 and 3 of stage 1.
Where a cause is injected, the replicas of a stage are on different hosts: ranks 0 and 2 on a, ranks 1 and 3 on b.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import commtrace

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import train_megatron_gpt as example
from megatron.core import parallel_state

RANK = int(os.environ["RANK"])
SLOW_RANK = 1
SLOW_STAGE = (2, 3)
SLOW_HOST = (1, 3)
ON_ONE_HOST = ("forward", "nobody")
SLOW_FORWARD_MS = 60
MILLISECONDS = 1e-3


def main(folder: Path, causes: list[str], options: list[str]) -> None:
    commtrace.stop()  # the example has started it
    # torch's own rendezvous finds the keys of the previous groups in the launcher's store, and hangs on them.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    init = dist.init_process_group
    module: Any = example
    module.use_cpu_for_cuda = functools.cache(module.use_cpu_for_cuda)
    for cause, _, iterations in (argument.partition("=") for argument in causes):
        own = dist.PrefixStore(cause, store)
        joined = functools.partial(init, store=own, rank=RANK, world_size=int(os.environ["WORLD_SIZE"]))
        slow_rank = ["--slow-rank", str(SLOW_RANK), "--slow-ms", str(SLOW_FORWARD_MS)] if cause == "forward" else []
        with ExitStack() as injected:
            injected.enter_context(mock.patch.object(dist, "init_process_group", joined))
            arguments = [sys.argv[0], *options, *slow_rank, "--iterations", iterations]
            injected.enter_context(mock.patch.object(sys, "argv", arguments))
            inject(cause, injected)
            host = {} if cause in ON_ONE_HOST else {"COMMTRACE_NODE_ID": "b" if RANK in SLOW_HOST else "a"}
            injected.enter_context(mock.patch.dict(os.environ, COMMTRACE_DIR=str(folder / cause), **host))
            commtrace.start()  # as the environment says, which names the node
            example.main()
            commtrace.stop()
            parallel_state.destroy_model_parallel()


def inject(cause: str, injected: ExitStack) -> None:
    """Make something slow until the end of ``injected``; nothing where the cause is "nobody"."""

    def replace(owner: object, name: str, replacement: Any) -> None:
        injected.enter_context(mock.patch.object(owner, name, replacement))

    if cause == "communication" and RANK == SLOW_RANK:
        replace(dist.Work, "wait", slow_wait(dist.Work.wait))
    if cause == "data" and RANK == SLOW_RANK:
        replace(example, "synthetic_batches", slow_batches(example.synthetic_batches))
    if cause not in ON_ONE_HOST:
        replace(example, "forward_step", slow_forward(cause, example.forward_step))


def slow_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """A slow link: what the rank waits for ends later, its own work does not change.

    Before commtrace replaces the method, so that the delay is part of what it sees.
    """

    def wait_longer(work: Any, *arguments: Any, **keywords: Any) -> Any:
        finished = wait(work, *arguments, **keywords)
        time.sleep(50 * MILLISECONDS)
        return finished

    return wait_longer


def slow_batches(batches: Callable[..., Iterator[torch.Tensor]]) -> Callable[..., Iterator[torch.Tensor]]:
    def load(options: Any, device: Any) -> Iterator[torch.Tensor]:
        return iter(torch.utils.data.DataLoader(Batches(batches(options, device)), batch_size=None))

    return load


def slow_forward(cause: str, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    lengths = random.Random(RANK)

    def slowed(options: Any, data: Any, model: Any) -> Any:
        if cause == "gc" and RANK == SLOW_RANK:
            collect_slowly()
        if (cause == "stage" and RANK in SLOW_STAGE) or (cause == "host" and RANK in SLOW_HOST):
            time.sleep(30 * MILLISECONDS)
        output, loss = forward_step(options, data, model)
        if cause == "sequences":
            output = _WorkOfLength.apply(output, lengths.choice([2, 15, 60]) * MILLISECONDS)
        return output, loss

    return slowed


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """The example's batches, from a storage that is slow."""

    def __init__(self, batches: Iterator[torch.Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self._batches:
            time.sleep(25 * MILLISECONDS)
            yield batch


class _WorkOfLength(torch.autograd.Function):
    """Forward and backward that last as long as a sequence of this length would make them."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * context.seconds)
        return gradients[0], None


class _SlowToFree:
    """A cycle that only the garbage collector frees, for as long as it would need for much garbage."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(80 * MILLISECONDS)


def collect_slowly() -> None:
    _SlowToFree()
    gc.collect()


if __name__ == "__main__":
    end_of_causes = sys.argv.index("--")
    main(Path(sys.argv[1]), sys.argv[2:end_of_causes], sys.argv[end_of_causes + 1 :])
