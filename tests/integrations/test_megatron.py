"""The Megatron integration against the real modules of megatron-core, with a tracer that only takes notes."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from commtrace.integrations import megatron
from commtrace.integrations.megatron import _MESSAGES
from commtrace.trace.schema import Coordinates
from tests.integrations.megatron_stubs import (
    NotingTracer,
    backward,
    forward,
    forward_results,
    initialize,
    noting,
    schedule_call,
    tiny_model,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron names the accelerator libraries that it does without
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import optimizer as optimizers
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.pipeline_parallel import combined_1f1b, schedules
    from megatron.core.pipeline_parallel import utils as megatron_utils
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import token_dispatcher


@pytest.fixture
def tracer() -> Iterator[NotingTracer]:
    tracer = noting()
    uninstall = megatron.install(tracer)
    yield tracer
    uninstall()


@pytest.fixture
def rank_1_of_8() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_backwards_are_matched_to_forwards_by_their_tensor(tracer: NotingTracer) -> None:
    model = tiny_model()

    first, second, third = forward(model, 0, 0), forward(model, 1, 0), forward(model, 0, 1)
    for output in (third, second, first):
        backward(output)

    assert tracer.notes == [
        "+forward m0 c0 s0", "-forward",
        "+forward m1 c0 s0", "-forward",
        "+forward m0 c1 s0", "-forward",
        "+backward m0 c1 s0", "-backward",
        "+backward m1 c0 s0", "-backward",
        "+backward m0 c0 s0", "-backward",
    ]  # fmt: skip
    assert tracer.failures == []


def test_a_tensor_that_no_forward_returned_belongs_to_the_oldest_forward(tracer: NotingTracer) -> None:
    model = tiny_model()
    kept = [forward(model, 4), forward(model, 5)]

    backward(model(torch.ones(1, 2)).sum())

    assert tracer.notes[-2:] == ["+backward m4 c0 s0", "-backward"]
    assert len(kept) == 2


def test_microbatches_are_counted_when_megatron_does_not_number_them(tracer: NotingTracer) -> None:
    model = tiny_model()
    forward(model, None)
    forward(model, None)

    assert tracer.notes[0::2] == ["+forward m0 c0 s0", "+forward m1 c0 s0"]


def test_the_chunk_is_the_models_when_megatron_does_not_pass_it(tracer: NotingTracer) -> None:
    model = tiny_model()
    model.vp_stage = 1
    forward(model, 0)

    assert tracer.notes == ["+forward m0 c1 s0", "-forward"]


def test_an_error_of_training_passes_through_and_closes_the_span(tracer: NotingTracer) -> None:
    def broken(tensor: torch.Tensor) -> None:
        raise ValueError("no such token")

    model = tiny_model()
    model.forward = broken

    with pytest.raises(ValueError, match="no such token"):
        forward(model, 0)

    assert tracer.notes == ["+forward m0 c0 s0", "-forward"]
    assert tracer.failures == []


def test_a_failure_of_the_tracer_switches_the_integration_off_and_not_training(
    tracer: NotingTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> str:
        raise RuntimeError("full")

    monkeypatch.setattr(tracer, "enter", broken)
    model = tiny_model()

    for _ in range(2):
        backward(forward(model, 0))

    assert tracer.failures == ["megatron: full"]
    assert tracer.notes == []


def test_a_call_of_a_schedule_is_a_step_and_tells_its_shape(tracer: NotingTracer, rank_1_of_8: None) -> None:
    initialize(1, 1)
    schedule_call()
    schedule_call(forward_only=False)

    assert tracer.notes == ["step", "step"]
    assert {name: tracer.topology[name] for name in ("schedule", "stages", "chunks", "microbatches")} == {
        "schedule": "no_pipelining",
        "stages": 1,
        "chunks": 2,
        "microbatches": 4,
    }


def test_sequences_of_another_length_repeat_no_topology(
    tracer: NotingTracer, rank_1_of_8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    initialize(1, 1)
    topologies: list[dict[str, Any]] = []
    monkeypatch.setattr(tracer, "set_topology", topologies.append)

    for length in (8, 16, 24):
        schedule_call(seq_length=length)

    assert ["schedule" in topology for topology in topologies].count(True) == 1


def test_steps_have_the_numbers_that_megatron_logs(
    tracer: NotingTracer, rank_1_of_8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = SimpleNamespace(curr_iteration=20)  # so many are completed: the one that begins is logged as 21
    loop = SimpleNamespace(_GLOBAL_ARGS=arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", loop)
    initialize(1, 1)
    schedule_call()
    schedule_call()  # again, because its result was suspicious
    arguments.curr_iteration = 21
    schedule_call()

    assert tracer.notes == ["step 21", "step 22"]
    assert tracer.topology["step_numbers"] == "Megatron's iterations"


def test_a_forward_only_call_is_an_evaluation_and_no_step(tracer: NotingTracer, rank_1_of_8: None) -> None:
    initialize(1, 1)
    schedule_call(forward_only=True)

    assert tracer.notes == ["end", "+evaluation", "-evaluation"]


OTHER_NAMES_IN_0_19 = {
    "_GTP_WEIGHT_REMAT_GROUP": "gtp",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP": "expert-gtp",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp-cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp-cp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expert-dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expert-dp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "gtp-tp-ep-pp",
}
"""Groups that megatron-core 0.19 has beside those of before, most of them the same ones by another name."""


def test_every_group_has_its_role(tracer: NotingTracer, rank_1_of_8: None) -> None:
    initialize(2, 2, context_parallel_size=2)

    roles = {
        name: tracer.roles[id(group)]
        for name, group in vars(parallel_state).items()
        if isinstance(group, dist.ProcessGroup)
    }
    assert roles == {
        "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
        "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
        "_DATA_PARALLEL_GROUP": "dp",
        "_CONTEXT_PARALLEL_GROUP": "cp",
        "_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
        "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
        "_EXPERT_TENSOR_PARALLEL_GROUP": "expert-tp",
        "_EXPERT_DATA_PARALLEL_GROUP": "expert-dp",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expert-dp",
        "_EMBEDDING_GROUP": "embedding",
        "_POSITION_EMBEDDING_GROUP": "position-embedding",
        "_MODEL_PARALLEL_GROUP": "mp",
        "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "dist-opt",
        **({name: role for name, role in OTHER_NAMES_IN_0_19.items() if hasattr(parallel_state, name)}),
    }
    assert tracer.failures == []


@pytest.mark.skipif(not hasattr(parallel_state, "_GTP_WEIGHT_REMAT_GROUP"), reason="it came with megatron-core 0.19")
def test_groups_of_generalized_tensor_parallelism_have_roles_of_their_own(
    tracer: NotingTracer, rank_1_of_8: None
) -> None:
    initialize(2, 1, gtp_remat_size=2, expert_gtp_remat_size=2)

    roles = {
        name: tracer.roles[id(group)]
        for name, group in vars(parallel_state).items()
        if isinstance(group, dist.ProcessGroup) and "GTP" in name
    }
    assert roles == {
        "_GTP_WEIGHT_REMAT_GROUP": "gtp",
        "_EXPERT_GTP_WEIGHT_REMAT_GROUP": "expert-gtp",
        "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "gtp-dp",
        "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "gtp-dp",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "gtp-dp",
        "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "gtp-expert-dp",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "gtp-expert-dp",
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "gtp-tp-ep-pp",
    }
    assert tracer.roles[id(parallel_state.get_data_parallel_group(with_gtp_remat=False))] == "dp"


def test_without_context_parallelism_dp_cp_is_dp(tracer: NotingTracer, rank_1_of_8: None) -> None:
    initialize(2, 2)

    assert tracer.roles[id(parallel_state.get_data_parallel_group(with_context_parallel=True))] == "dp"
    assert tracer.roles[id(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))] == "tp-dp"


def test_coordinates_and_sizes(tracer: NotingTracer, rank_1_of_8: None) -> None:
    initialize(2, 2, virtual_pipeline_model_parallel_size=3)

    assert tracer.topology["coordinates"] == {"tp": 1, "pp": 0, "dp": 0, "cp": 0, "ep": 0}
    assert tracer.topology["parallel"] == {"tp": 2, "pp": 2, "dp": 2, "cp": 1, "ep": 1, "vpp": 3}
    assert tracer.topology["framework"]["name"] == "megatron-core"
    assert tracer.topology["framework"]["version"]


def test_groups_are_read_again_when_megatron_sets_them_up_again(tracer: NotingTracer, rank_1_of_8: None) -> None:
    initialize(2, 2)
    parallel_state.destroy_model_parallel()
    initialize(4, 1)

    assert tracer.topology["parallel"]["tp"] == 4
    assert tracer.roles[id(parallel_state.get_tensor_model_parallel_group())] == "tp"


def test_groups_that_were_there_before_commtrace_are_read_at_once(rank_1_of_8: None) -> None:
    initialize(2, 2)
    tracer = noting()

    megatron.install(tracer)()

    assert tracer.topology["coordinates"]["tp"] == 1


def test_a_collection_of_groups_does_instead_of_parallel_state(tracer: NotingTracer, rank_1_of_8: None) -> None:
    collection = ProcessGroupCollection()
    collection.tp, collection.pp = dist.new_group([0, 1]), dist.new_group([1, 3, 5, 7])
    schedule_call(pg_collection=collection)

    assert (tracer.roles[id(collection.tp)], tracer.roles[id(collection.pp)]) == ("tp", "pp")


MULTI_MODULE = hasattr(schedules, "backward_step_multimodule")


@pytest.mark.skipif(not MULTI_MODULE, reason="pipelines of several modules came with megatron-core 0.19")
def test_a_pipeline_of_several_modules_has_its_roles_and_its_stages(tracer: NotingTracer, rank_1_of_8: None) -> None:
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

    collections = {"encoder": ProcessGroupCollection(), "language": ProcessGroupCollection()}
    for collection in collections.values():
        collection.tp, collection.pp = dist.new_group([0, 1]), dist.new_group([1, 3])
    bridge = SimpleNamespace(
        bridge_pg=dist.new_group([1, 5]), src_grid_broadcast_pg=dist.new_group([0, 1]), dest_grid_broadcast_pg=None
    )
    schedule_call(
        pg_collection=MultiModuleProcessGroupCollection(collections, "language"),
        p2p_communicator=SimpleNamespace(bridge_comms=[bridge], total_stages=4, current_stage=3),
    )
    forward(tiny_model(), 0)

    for collection in collections.values():
        assert (tracer.roles[id(collection.tp)], tracer.roles[id(collection.pp)]) == ("tp", "pp")
    assert tracer.roles[id(bridge.bridge_pg)] == "pp"
    assert tracer.roles[id(bridge.src_grid_broadcast_pg)] == "bridge"
    assert tracer.topology["stages"] == 4
    assert tracer.notes == ["step", "+forward m0 c0 s3", "-forward"]
    assert tracer.failures == []


@pytest.mark.skipif(not MULTI_MODULE, reason="pipelines of several modules came with megatron-core 0.19")
def test_backwards_of_several_modules_are_matched_to_forwards(tracer: NotingTracer) -> None:
    def modules_of(_batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.ones(1, requires_grad=True) * 2 for name in ("encoder", "language")}

    model = tiny_model()
    model.forward = modules_of
    outputs = []
    for microbatch in (0, 1):
        output, _ = forward_results(model, microbatch, is_last_stage=False)
        outputs.append(output)
    config = SimpleNamespace(timers=None, grad_scale_func=None, deallocate_pipeline_outputs=False)
    for output in reversed(outputs):
        gradients = {name: torch.ones(1) for name in output}
        schedules.backward_step_multimodule({"encoder": None}, output, gradients, config, "language")

    assert tracer.notes[4:] == ["+backward m1 c0 s0", "-backward", "+backward m0 c0 s0", "-backward"]
    assert tracer.failures == []


class Trained(torch.nn.Module):
    """What a schedule is given: a model with a configuration, here inside a wrapper that has none."""

    def __init__(self, finalize: Callable[..., None] | None) -> None:
        super().__init__()
        module: Any = torch.nn.Identity()
        module.config = SimpleNamespace(finalize_model_grads_func=finalize)
        self.module = module


def forward_backward_no_pipelining(*, model: Any, num_microbatches: int = 1) -> None:
    """Stands in for a schedule: it calls what the configuration holds, as the real ones do at their end."""
    model[0].module.config.finalize_model_grads_func(model, None)


def test_whatever_function_finalizes_the_gradients_is_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = noting()

    def bound_before_commtrace(_model: Any, _tokens: Any) -> None:
        tracer.notes.append("finalize")

    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", forward_backward_no_pipelining)
    uninstall = megatron.install(tracer)
    model = Trained(bound_before_commtrace)
    for _ in range(2):
        schedules.forward_backward_no_pipelining(model=[model])
        assert model.module.config.finalize_model_grads_func is bound_before_commtrace
    uninstall()

    assert tracer.notes == ["step", "+phase", "finalize", "-phase"] * 2
    assert tracer.failures == []


def test_a_model_without_a_function_that_finalizes_trains_on(tracer: NotingTracer, rank_1_of_8: None) -> None:
    initialize(1, 1)
    for model in ([Trained(None), None], [None, None]):
        with pytest.raises((AssertionError, AttributeError, RuntimeError)):
            schedules.forward_backward_no_pipelining(
                forward_step_func=None, data_iterator=None, model=model, num_microbatches=4, seq_length=8,
                micro_batch_size=1,
            )  # fmt: skip

    assert tracer.notes == ["step", "step"]
    assert tracer.failures == []


def test_the_real_schedules_call_what_the_configuration_holds() -> None:
    source = inspect.getsource(schedules)

    assert source.count("config.finalize_model_grads_func(\n") == 3


def test_only_the_outermost_optimizer_is_a_span(tracer: NotingTracer) -> None:
    class Stopped(LayerWiseDistributedOptimizer):
        """Stops at an overflow; what it is chained of is stepped inside of it.

        Up to 0.18 it has a step of its own that calls that of its base class, later it has the base class's only.
        """

        def __init__(self) -> None:
            self.chained_optimizers: list[Any] = []

        def prepare_grads(self) -> bool:
            Chained().step()
            return True

        def allgather_params(self) -> None:
            return None

    class Chained(Stopped):
        def prepare_grads(self) -> bool:
            tracer.notes.append("chained")
            return True

    assert Stopped().step() == (False, None, None)

    assert tracer.notes == ["+optimizer", "chained", "-optimizer"]


def test_an_optimizer_class_of_the_users_own_is_found_at_the_next_step(tracer: NotingTracer, rank_1_of_8: None) -> None:
    class Own(optimizers.FP32Optimizer):
        def __init__(self) -> None:
            self.is_stub_optimizer = True

        def step(self) -> bool:
            return True

    initialize(1, 1)
    schedule_call()

    assert Own().step()
    assert tracer.notes == ["step", "+optimizer", "-optimizer"]


def test_a_combined_step_is_a_forward_and_a_backward_of_different_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan needs CUDA streams: what is tested is what is put around the real function's arguments."""
    tracer = noting()

    def step(f_model: Any, b_model: Any, f_model_chunk_id: Any = None, current_microbatch: Any = None) -> None:
        tracer.notes.append("both" if f_model and b_model else "one")

    monkeypatch.setattr(combined_1f1b, "combined_forward_backward_step", step)
    uninstall = megatron.install(tracer)
    chunks = [SimpleNamespace(vp_stage=number) for number in (0, 1)]
    combined_1f1b.combined_forward_backward_step(chunks[0], None, f_model_chunk_id=0, current_microbatch=0)
    combined_1f1b.combined_forward_backward_step(chunks[1], chunks[0], f_model_chunk_id=1, current_microbatch=3)
    combined_1f1b.combined_forward_backward_step(None, chunks[0])
    uninstall()

    assert tracer.notes == [
        "+forward m0 c0 s0", "one", "-forward",
        "+backward m0 c0 s0", "+forward m3 c1 s0", "both", "-forward", "-backward",
        "+backward m1 c0 s0", "one", "-backward",
    ]  # fmt: skip
    assert combined_1f1b.combined_forward_backward_step is step


def test_communication_of_a_combined_step_has_the_place_of_its_issuer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes run forward or backward; messages to other stages have no place, as in all other schedules."""
    tracer = noting()
    seen: list[tuple[str, int, int]] = []

    def note(what: str) -> None:
        seen.append((what, tracer.coordinates.microbatch, tracer.coordinates.chunk))

    def step(f_model: Any, b_model: Any, post_forward: Any, post_backward: Any, current_microbatch: Any = None) -> None:
        node = megatron_utils.ScheduleNode(lambda: note("forward"), None, None)
        node.forward()
        node.backward(None)
        for message in (post_forward, post_backward):
            message()
        note("after")

    monkeypatch.setattr(combined_1f1b, "combined_forward_backward_step", step)
    monkeypatch.setattr(megatron_utils.ScheduleNode, "_forward", lambda node, *_: node.forward_func())
    monkeypatch.setattr(megatron_utils.ScheduleNode, "_backward", lambda node, *_: note("backward"))
    uninstall = megatron.install(tracer)
    message = functools.partial(note, "message")
    chunks = [SimpleNamespace(vp_stage=number) for number in (0, 1)]
    for f_model, b_model in ((chunks[1], chunks[0]), (chunks[1], None)):
        tracer.coordinates = Coordinates()
        combined_1f1b.combined_forward_backward_step(
            f_model, b_model, post_forward=message, post_backward=message, current_microbatch=3
        )
    uninstall()

    assert seen == [
        ("forward", 3, 1), ("backward", 0, 0), ("message", -1, -1), ("message", -1, -1), ("after", 3, 1),
        ("forward", 3, 1), ("backward", 3, 1), ("message", -1, -1), ("message", -1, -1), ("after", 3, 1),
    ]  # fmt: skip
    assert tracer.failures == []


def test_the_real_combined_step_has_the_parameters_that_are_read() -> None:
    parameters = inspect.signature(combined_1f1b.combined_forward_backward_step).parameters

    assert {"f_model", "b_model", "f_model_chunk_id", "current_microbatch", *_MESSAGES} <= set(parameters)
    assert "backward" in vars(megatron_utils.ScheduleNode)
    assert "pre_forward=pre_forward" in inspect.getsource(combined_1f1b), "passed by keyword"


def test_parts_of_the_work_are_phases(tracer: NotingTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, owner, method, _ in megatron._PHASES:
        holder = getattr(token_dispatcher, owner, None) or getattr(param_and_grad_buffer, owner)
        assert method in vars(holder)
    with pytest.raises(AttributeError):  # of an instance that nobody has initialised
        token_dispatcher.MoEAlltoAllTokenDispatcher.token_dispatch(SimpleNamespace(), torch.ones(1), torch.ones(1))

    assert tracer.notes == ["+phase", "-phase"]


def test_uninstall_puts_every_original_back() -> None:
    owners: list[Any] = [
        schedules, parallel_state, optimizers.MixedPrecisionOptimizer, optimizers.FP32Optimizer,
        optimizers.ChainedOptimizer, LayerWiseDistributedOptimizer,
    ]  # fmt: skip
    before = [dict(vars(owner)) for owner in owners]

    uninstall = megatron.install(noting())
    now = [dict(vars(owner)) for owner in owners]
    uninstall()

    replaced = {name for then, held in zip(before, now, strict=True) for name in then if then[name] is not held[name]}
    assert replaced - {"backward_step_multimodule"} == {
        "forward_backward_no_pipelining", "forward_backward_pipelining_with_interleaving",
        "forward_backward_pipelining_without_interleaving", "forward_step", "backward_step",
        "initialize_model_parallel", "destroy_model_parallel", "step",
    }  # fmt: skip
    for owner, then in zip(owners, before, strict=True):
        assert {name for name, value in then.items() if vars(owner).get(name) is not value} == set()


def test_functions_bound_before_uninstall_still_work_and_record_nothing() -> None:
    tracer = noting()
    uninstall = megatron.install(tracer)
    bound = schedules.backward_step
    model = tiny_model()
    output = forward(model, 0)
    uninstall()
    tracer.notes.clear()

    backward(output, bound)

    assert tracer.notes == []
    assert model.weight.grad is not None


def test_sizes_that_cannot_be_read_cost_nothing_but_the_plan(tracer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise TypeError("another version")

    monkeypatch.setattr(megatron, "megatron_sizes", fail)
    integration = megatron.MegatronIntegration(tracer)
    integration._report_schedule("forward_backward_no_pipelining", {"model": None, "num_microbatches": 2})

    assert tracer.failures == ["megatron sizes: another version"]
    assert tracer.topology["microbatches"] == 2
