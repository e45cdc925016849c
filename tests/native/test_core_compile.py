"""torch.compile makes the same graphs of a program, with the same breaks, with and without the extension."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commtrace.capture.hooks import keep_compiler_out
from commtrace.trace import schema
from tests.capture.recording import Recording
from tests.process_groups import world_group

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("native_engine", "world"),
]

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def reduces(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def reduces_functionally(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x * 2, "sum", world_group()) + 1


def reduces_and_waits(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 3
    assert work is not None
    work.wait()
    return y + z


def calls_the_group(x: torch.Tensor) -> torch.Tensor:
    world_group().allreduce([x * 2])
    return x + 1


def gathers(x: torch.Tensor) -> torch.Tensor:
    output = torch.empty(4 * x.numel())
    all_gather(output, x * 2)
    return output.sum()


def sends(x: torch.Tensor) -> torch.Tensor:
    dist.send(x * 2, 1)
    return x + 1


def asks_for_its_place(x: torch.Tensor) -> torch.Tensor:
    return x * dist.get_rank() + dist.get_world_size()


PROGRAMS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    reduces, reduces_functionally, reduces_and_waits, calls_the_group, gathers, sends, asks_for_its_place,
]  # fmt: skip

NAMES_OF_OURS = re.compile(r"0x[0-9a-f]+|line \d+")


def explained(program: Callable[[torch.Tensor], torch.Tensor], backend: str) -> list[Any]:
    """What torch says of a program that it compiles, and what that returns."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            explanation = torch._dynamo.explain(program)(torch.ones(4))
            said: list[Any] = [
                explanation.graph_count,
                explanation.graph_break_count,
                [NAMES_OF_OURS.sub("", str(reason.reason)) for reason in explanation.break_reasons],
            ]
        except Exception as error:
            said = [type(error).__name__]
        torch._dynamo.reset()
        for fullgraph in (False, True):
            try:
                compiled = torch.compile(program, backend=backend, fullgraph=fullgraph)
                said.append([compiled(torch.ones(4)).tolist() for _ in range(2)])
            except Exception as error:
                said.append(type(error).__name__)
    torch._dynamo.reset()
    return said


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_compiled_programs_are_the_same(program: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    plain = explained(program, backend)
    recording = Recording()
    let_compiler_in = keep_compiler_out(recording.tracer)
    with recording.capturing():
        captured = explained(program, backend)
        num_recorded = len(recording.rows(schema.COLLECTIVE, schema.P2P))
    let_compiler_in()
    uncaptured = explained(program, backend)

    assert captured == plain
    assert uncaptured == plain
    assert [text for text in recording.warnings() if "switched off" in text] == []
    assert num_recorded > 0 or program not in (reduces_and_waits, sends)  # others are compiled, to calls of C++
