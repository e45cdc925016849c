"""The DeepSpeed integration around the classes of DeepSpeed, with a tracer that only takes notes.

The engines have no constructor and small methods of their own, put into DeepSpeed's classes before the integration
comes: what is tested is what it puts around them. Real training is tested end to end.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commtrace.integrations import deepspeed as integration
from commtrace.trace import schema
from tests.integrations.deepspeed_stubs import (
    GATHER,
    ZERO_METHODS,
    NotingTracer,
    Originals,
    empty_engines,
    engine_of,
    noting,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import groups


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_engines(monkeypatch)


@pytest.fixture
def tracer(originals: None) -> Iterator[NotingTracer]:
    tracer = noting()
    uninstall = integration.install(tracer)
    yield tracer
    uninstall()


def micro_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1)))
    engine.step()


def test_a_step_reaches_from_one_boundary_of_the_accumulation_to_the_next(tracer: NotingTracer) -> None:
    engine = engine_of(global_steps=7)

    for _ in range(3):
        micro_step(engine)

    assert tracer.notes == [
        "step 8",
        "+forward m0 s0", "-forward", "+backward m0 s0", "-backward",
        "+forward m1 s0", "-forward", "+backward m1 s0", "-backward", "+optimizer NoneType", "-optimizer",
        "step 9",
        "+forward m0 s0", "-forward", "+backward m0 s0", "-backward",
    ]  # fmt: skip
    assert tracer.failures == []


def test_forwards_before_one_backward_are_one_micro_step(tracer: NotingTracer) -> None:
    engine = engine_of()

    chosen, rejected = engine(torch.ones(1)), engine(torch.zeros(1))
    engine.backward(chosen - rejected)
    engine(torch.ones(1))

    forwards = [note for note in tracer.notes if note.startswith("+forward")]
    assert forwards == ["+forward m0 s0", "+forward m0 s0", "+forward m1 s0"]


def test_every_step_is_a_boundary_where_the_user_owns_it(tracer: NotingTracer) -> None:
    engine = engine_of(managed=False, accumulation=100)

    micro_step(engine)
    micro_step(engine)

    assert [note for note in tracer.notes if note.startswith("step")] == ["step 1", "step 2"]
    assert tracer.notes.count("+optimizer NoneType") == 2


def test_a_direct_backward_is_timed_by_what_deepspeed_does_around_it(tracer: NotingTracer) -> None:
    engine = engine_of()
    engine(torch.ones(1))
    engine._backward_prologue()
    engine._backward_epilogue()

    engine(torch.ones(1))
    engine._backward_prologue()  # and an error, so that there is no epilogue
    engine.step()

    assert tracer.notes[3:5] == ["+backward m0 s0", "-backward"]
    assert tracer.notes[5:] == ["+forward m1 s0", "-forward", "+backward m1 s0", "-backward"]


def test_a_forward_without_gradients_is_evaluation(tracer: NotingTracer) -> None:
    engine = engine_of()

    with torch.no_grad():
        engine(torch.ones(1))

    assert tracer.notes == ["+evaluation", "-evaluation"]


def test_the_microbatch_of_another_framework_stands(tracer: NotingTracer) -> None:
    engine = engine_of(accumulation=1)
    tracer.begin_step(3)
    tracer.notes.clear()

    span = tracer.enter(schema.FORWARD, "forward", 5, 0, 0)
    output = engine(torch.ones(1))
    tracer.leave(span)
    span = tracer.enter(schema.BACKWARD, "backward", 5, 0, 0)
    engine.backward(output)
    tracer.leave(span)
    engine.step()

    assert tracer.notes == [
        "+forward m5 s0", "-forward", "+backward m5 s0", "-backward", "+optimizer NoneType", "-optimizer",
    ]  # fmt: skip


def test_one_engine_begins_the_steps_as_long_as_it_lives(tracer: NotingTracer) -> None:
    actor, critic = engine_of(accumulation=1), engine_of(accumulation=1, global_steps=50)
    for _ in range(2):
        micro_step(actor)
        micro_step(critic)
    assert [note for note in tracer.notes if note.startswith("step")] == ["step 1", "step 2"]

    del actor
    gc.collect()
    micro_step(critic)
    critic.global_steps = 3  # it has gone back to a checkpoint
    micro_step(critic)

    assert [note for note in tracer.notes if note.startswith("step")][2:] == ["step 53", "step 54"]


def test_a_pipeline_is_its_instructions(tracer: NotingTracer) -> None:
    instructions = [
        "LoadMicroBatch", "ForwardPass", "ForwardPass", "BackwardPass", "BackwardPass", "ReduceTiedGrads",
        "OptimizerStep",
    ]  # fmt: skip
    engine = engine_of(PipelineEngine, stage_id=1, num_stages=2, instructions=instructions, global_steps=4)

    engine.train_batch()
    engine.eval_batch()

    assert tracer.notes == [
        "step 5",
        "+data m0 s1", "-data",
        "+forward m0 s1", "-forward", "+forward m1 s1", "-forward",
        "+backward m0 s1", "-backward", "+backward m1 s1", "-backward",
        "+phase reduce tied", "-phase",
        "+optimizer NoneType", "-optimizer",
        "end", "+evaluation", "-evaluation",
    ]  # fmt: skip
    assert tracer.topology["schedule"] == "1f1b"
    assert tracer.topology["stages"] == 2
    assert tracer.failures == []


def test_zero_gathers_and_reduces_in_phases(tracer: NotingTracer) -> None:
    for owner, name in ZERO_METHODS:
        getattr(owner, name)(None)

    assert tracer.notes == ["+phase gather", "-phase", "+phase reduce", "-phase", "+phase reduce", "-phase"]


def test_parameters_of_other_modules_than_the_one_that_is_next_are_prefetched(tracer: NotingTracer) -> None:
    class Coordinator(PartitionedParameterCoordinator):
        def __init__(self) -> None:
            return None

        def _fetch_sub_module_impl(self, current_submodule: Any, forward: bool, is_leaf: bool) -> None:
            for parameter in wanted:
                getattr(self, GATHER)({parameter}, forward)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    wanted = [model[0].weight, model[0].bias, model[1].weight, model[2].weight]
    first: Any = model[0]
    first._external_params = {1: model[2].weight}
    Coordinator().fetch_sub_module(model[0], True)
    getattr(Coordinator(), GATHER)({model[1].weight}, True)

    begun = [note.removeprefix("+phase ") for note in tracer.notes if note.startswith("+")]
    assert begun == ["gather", "gather", "prefetch", "gather", "gather"]


def test_saving_is_a_checkpoint(tracer: NotingTracer) -> None:
    engine_of().save_checkpoint("folder")

    assert tracer.notes == ["+checkpoint save", "-checkpoint"]


def test_an_error_of_training_passes_through_and_closes_the_span(tracer: NotingTracer) -> None:
    with pytest.raises(TypeError):
        engine_of()("no tensor", "too many")

    assert tracer.notes == ["step 1", "+forward m0 s0", "-forward"]
    assert tracer.failures == []


@pytest.mark.parametrize("broken", ["enter", "leave", "begin_step", "set_topology"])
def test_a_failure_of_the_tracer_switches_the_integration_off_and_not_training(
    broken: str, tracer: NotingTracer
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("full")

    setattr(tracer, broken, fail)
    engine = engine_of(accumulation=1)

    for _ in range(2):
        micro_step(engine)

    assert engine.global_steps == 2
    assert set(tracer.failures) == {"deepspeed: full"}
    noted = len(tracer.notes)
    micro_step(engine)
    assert len(tracer.notes) == noted


def test_uninstalling_puts_every_original_back(originals: None) -> None:
    owners = [
        DeepSpeedEngine, PipelineEngine, PartitionedParameterCoordinator,
        DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer,
    ]  # fmt: skip
    before = [dict(vars(owner)) for owner in owners]
    instructions = dict(PipelineEngine._INSTRUCTION_MAP)

    uninstall = integration.install(noting())
    assert DeepSpeedEngine.forward is not Originals.forward
    assert vars(DeepSpeedZeroOptimizer)["reduce_ipg_grads"] is not Originals.nothing
    assert instructions != PipelineEngine._INSTRUCTION_MAP
    uninstall()

    for owner, known in zip(owners, before, strict=True):
        now = vars(owner)
        assert {name for name in known if now[name] is not known[name]} == set()
        assert set(now) == set(known)
    assert instructions == PipelineEngine._INSTRUCTION_MAP


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_roles_and_coordinates_come_from_the_grid_the_globals_and_the_engine(
    tracer: NotingTracer, rank_1_of_4: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pp, dp, tp, mp = (dist.new_group(ranks) for ranks in ([1, 3], [0, 1], [1], [1, 3]))
    ep, expert_dp, world = (dist.new_group(ranks) for ranks in ([0, 1], [1], [0, 1, 2, 3]))
    parameter: Any = torch.nn.Parameter(torch.ones(1))
    parameter.ds_process_group = dist.group.WORLD
    grid = SimpleNamespace(
        get_pipe_parallel_group=lambda: pp,
        get_data_parallel_group=lambda: dp,
        get_slice_parallel_group=lambda: tp,
        get_model_parallel_group=lambda: mp,
    )
    monkeypatch.setattr(groups, "_EXPERT_PARALLEL_GROUP", {"ep_size_2": ep})
    monkeypatch.setattr(groups, "_EXPERT_DATA_PARALLEL_GROUP", {"ep_size_2": expert_dp})
    monkeypatch.setattr(groups, "_WORLD_GROUP", world)
    engine = engine_of(grid=grid, data_parallel_group=dp, accumulation=8, parameter=parameter)

    micro_step(engine)

    assert tracer.failures == []
    expected = {"pp": pp, "dp": dp, "tp": tp, "mp": mp, "ep": ep, "expert-dp": expert_dp, "world": world}
    assert tracer.roles == {id(group): role for role, group in expected.items()} | {id(dist.group.WORLD): "dp"}
    assert tracer.topology["coordinates"] == {"tp": 0, "pp": 0, "dp": 1, "ep": 1, "expert-dp": 0}
    assert tracer.topology["parallel"] == {"tp": 1, "pp": 2, "dp": 2, "ep": 2, "expert-dp": 1}
    assert tracer.topology["framework"]["name"] == "deepspeed"
    assert tracer.topology["microbatches"] == 8
    assert tracer.topology["zero_stage"] == 3


def test_a_compiled_engine_says_that_it_communicates_out_of_sight(tracer: NotingTracer) -> None:
    micro_step(engine_of(deep_compile=True))

    assert tracer.untraced_paths == {"graphs compiled by DeepCompile"}


def test_megatrons_groups_are_left_to_the_integration_of_megatron(
    tracer: NotingTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel_state = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state)

    micro_step(engine_of(mpu=parallel_state))

    assert tracer.roles == {}
    assert "coordinates" not in tracer.topology
    assert "framework" in tracer.topology
