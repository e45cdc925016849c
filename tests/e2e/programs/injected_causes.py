"""The Megatron example, with one thing made slow on purpose. Arguments: the cause, then the example's own options.

Ranks 0 and 1 are the replicas of stage 0, ranks 2 and 3 those of stage 1.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

RANK = int(os.environ["RANK"])
SLOW_RANK = 1
SLOW_STAGE = (2, 3)
SLOW_HOST = (1, 3)
MILLISECONDS = 1e-3


def delay_waits() -> None:
    """A slow link: what the rank waits for ends later, its own work does not change.

    Before commtrace replaces the method, so that the delay is part of what it sees.
    """
    from torch.distributed import Work

    wait = Work.wait

    def slow_wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
        finished = wait(work, *arguments, **keywords)
        time.sleep(25 * MILLISECONDS)
        return finished

    Work.wait = slow_wait  # type: ignore[method-assign]


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


def main(cause: str) -> None:
    if cause == "communication" and RANK == SLOW_RANK:
        delay_waits()
    import train_megatron_gpt as example

    forward_step: Callable[..., Any] = example.forward_step
    lengths = random.Random(RANK)

    def slowed(options: Any, data: Any, model: Any) -> Any:
        if cause == "gc" and RANK == SLOW_RANK:
            collect_much()
        if (cause == "stage" and RANK in SLOW_STAGE) or (cause == "host" and RANK in SLOW_HOST):
            time.sleep(30 * MILLISECONDS)
        output, loss = forward_step(options, data, model)
        if cause == "sequences":
            output = _WorkOfLength.apply(output, lengths.choice([2, 15, 60]) * MILLISECONDS)
        return output, loss

    example.forward_step = slowed
    if cause == "data" and RANK == SLOW_RANK:
        synthetic_batches = example.synthetic_batches

        def slow_batches(options: Any, device: Any) -> Iterator[torch.Tensor]:
            return iter(torch.utils.data.DataLoader(Batches(synthetic_batches(options, device)), batch_size=None))

        example.synthetic_batches = slow_batches
    example.main()


def collect_much() -> None:
    """Cycles that only the garbage collector frees, and a collection of them."""
    for _ in range(40_000):
        cycle: list[Any] = []
        cycle.append(cycle)
    gc.collect()


if __name__ == "__main__":
    main(sys.argv.pop(1))
