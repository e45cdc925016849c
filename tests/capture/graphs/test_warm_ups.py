"""Warm-ups before captures, of functions with the names that libraries give them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from commtrace.capture.graphs.warm_ups import WARM_UP, WarmUps
from commtrace.capture.hooks import RAISED
from commtrace.trace import schema
from tests.capture.recording import Recording

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def warm_ups(captured: Recording) -> Iterator[WarmUps]:
    parts = WarmUps(captured.tracer)
    parts.install()
    yield parts
    parts.uninstall()
    assert captured.warnings() == []


def communicate() -> None:
    distributed_c10d._get_default_group().allreduce([torch.ones(2)]).wait()


def steps_of(recording: Recording) -> list[int]:
    return [row.step for row in recording.communications()]


def test_those_of_torch_belong_to_no_step(captured: Recording, warm_ups: WarmUps) -> None:
    captured.tracer.begin_step(3)
    communicate()
    # It warms up before it refuses what is no tensor; there is no GPU here.
    with pytest.raises(Exception):  # noqa: B017, PT011
        torch.cuda.make_graphed_callables(lambda: communicate(), ())
    communicate()

    assert {step for step in steps_of(captured) if step >= 0} == {3}
    assert captured.tracer.coordinates.step == 3
    assert [row.name for row in captured.rows(schema.PHASE)] == [WARM_UP]


@pytest.mark.parametrize("outer", ["transformer_engine", "megatron"])
def test_those_of_libraries_are_found_when_they_are_imported(
    outer: str, captured: Recording, warm_ups: WarmUps, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = ModuleType("transformer_engine.pytorch.graph")
    exec(  # as it calls its inner function: by a name of its module
        "def _make_graphed_callables(warm_up): warm_up()\n"
        "def make_graphed_callables(warm_up): _make_graphed_callables(warm_up)",
        vars(engine),
    )
    megatron: Any = ModuleType("megatron.core.transformer.cuda_graphs")
    exec(
        "class _CudagraphGlobalRecord:\n    @classmethod\n    def create_cudagraphs(cls, warm_up): warm_up()",
        vars(megatron),
    )
    bound_early = engine.make_graphed_callables
    parts = WarmUps(captured.tracer)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.graph", engine)
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.cuda_graphs", megatron)
    for package in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    parts.install()
    captured.tracer.begin_step(0)
    communicate()
    if outer == "megatron":
        megatron._CudagraphGlobalRecord.create_cudagraphs(lambda: bound_early(communicate))
    else:
        bound_early(communicate)
    communicate()
    parts.uninstall()

    assert steps_of(captured) == [0, -1, 0]
    assert [row.name for row in captured.rows(schema.PHASE)] == [WARM_UP]


def test_a_step_that_begins_meanwhile_stays(captured: Recording, warm_ups: WarmUps) -> None:
    captured.tracer.begin_step(0)
    begun = warm_ups._begin((), {})
    assert begun is not None
    captured.tracer.begin_step(1)
    warm_ups._end(begun, RAISED)

    assert captured.tracer.coordinates.step == 1
