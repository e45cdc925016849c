"""Real DDP and FSDP models in loops without a line for commtrace, on the backend that sends nothing."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commtrace.capture.collectives.ddp_reducer import CppCalls, ReducerCapture
from commtrace.capture.model.optimizers import OptimizerPhase
from commtrace.integrations import data_parallel, loop
from commtrace.trace import schema
from tests.capture.recording import Recording, fake_backend

fully_shard = pytest.importorskip(
    "torch.distributed.fsdp._fully_shard", reason="torch 2.4 and 2.5 have it elsewhere"
).fully_shard

WORK = (schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER, schema.EVALUATION)
CPU = torch.device("cpu")


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def watched(recording: Recording) -> Iterator[Recording]:
    phase = OptimizerPhase(recording.tracer)
    phase.install()
    uninstall = loop.install(recording.tracer)
    yield recording
    uninstall()
    phase.uninstall()
    assert recording.warnings() == []


@pytest.fixture
def looping(watched: Recording) -> Iterator[Recording]:
    """Rank 1 of 4, on the backend that sends nothing."""
    with fake_backend(rank=1):
        yield watched


@pytest.fixture
def alone(watched: Recording) -> Iterator[Recording]:
    """The only rank under gloo, as the reducer of DDP needs a backend that answers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield watched
    dist.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def batch() -> torch.Tensor:
    return torch.ones(2, 8)


def train(trained: nn.Module, optimizer: torch.optim.Optimizer, iterations: int = 2) -> None:
    for _ in range(iterations):
        trained(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def work(recording: Recording) -> list[tuple[str, int, int]]:
    """What the loop did, with step and microbatch."""
    return [(schema.KINDS[row.kind], row.step, row.microbatch) for row in recording.rows(*WORK)]


def roles(recording: Recording) -> dict[tuple[int, ...], str]:
    return {group.ranks: group.role for group in recording.tracer.groups.known_groups()}


ITERATION = [("forward", 0, 0), ("backward", 0, 0), ("optimizer", 0, -1)]
TWO_ITERATIONS = ITERATION + [(kind, 1, microbatch) for kind, _, microbatch in ITERATION]


def test_ddp(alone: Recording) -> None:
    trained = DistributedDataParallel(model())
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1))

    assert work(alone) == TWO_ITERATIONS
    assert roles(alone) == {(0,): "dp"}
    _, topology = alone.tracer.topology()
    assert topology == {
        "coordinates": {"dp": 0}, "parallel": {"dp": 1}, "framework": {"name": "DDP", "version": torch.__version__},
        "first_step": 0,
    }  # fmt: skip


def test_fsdp_of_the_first_generation(looping: Recording) -> None:
    inner = nn.Sequential(FullyShardedDataParallel(model(), device_id=CPU), nn.Linear(4, 4))
    trained = FullyShardedDataParallel(inner, device_id=CPU)
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1))

    assert work(looping) == TWO_ITERATIONS
    assert roles(looping) == {(0, 1, 2, 3): "dp"}


def test_fully_shard(looping: Recording) -> None:
    trained = nn.Sequential(model(), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (4,))
    for layer in trained:
        fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1))

    assert work(looping) == TWO_ITERATIONS
    assert roles(looping) == {(0, 1, 2, 3): "dp"}


def test_groups_of_hybrid_sharding_say_which_of_the_two_they_are(looping: Recording) -> None:
    trained = nn.Sequential(model(), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(trained, mesh=mesh)

    data_parallel.announce(looping.tracer, "FSDP", data_parallel.groups_below(trained))

    assert roles(looping) == {(0, 1, 2, 3): "world", (0, 1): "shard", (1, 3): "replicate"}
    _, topology = looping.tracer.topology()
    assert topology["coordinates"] == {"shard": 1, "replicate": 0}


def test_a_mesh_dimension_keeps_its_name(looping: Recording) -> None:
    trained = model()
    fully_shard(trained, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard_cp",)))
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1), iterations=1)

    assert set(roles(looping).values()) == {"dp_shard_cp"}


def test_accumulation_numbers_the_microbatches(alone: Recording) -> None:
    trained = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(2):
        with trained.no_sync():
            trained(batch()).sum().backward()
        trained(batch()).sum().backward()
        optimizer.step()

    assert [row for row in work(alone) if row[1] == 1] == [
        ("forward", 1, 0), ("backward", 1, 0), ("forward", 1, 1), ("backward", 1, 1), ("optimizer", 1, -1),
    ]  # fmt: skip


def test_evaluation_is_no_forward(looping: Recording) -> None:
    trained = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(model(), device_id=CPU)), device_id=CPU
    ).eval()
    with torch.no_grad():
        trained(batch())

    assert work(looping) == [("evaluation", -1, -1)]


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch())
    model.train()


def evaluations(recording: Recording) -> list[tuple[str, int, int]]:
    return [(row.name, row.step, row.lane) for row in recording.rows(schema.EVALUATION)]


IN_MODE = "eval() to train()"


class Own(nn.Sequential):
    """As models of transformers do it."""

    def eval(self) -> Own:
        return self.train(False)

    def train(self, mode: bool = True) -> Own:
        return super().train(mode)


@pytest.mark.parametrize("wrapper", [nn.Sequential, Own])
def test_a_bare_model_is_evaluated_from_eval_to_train(watched: Recording, wrapper: type[nn.Sequential]) -> None:
    trained = wrapper(model())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    train(trained, optimizer)
    evaluate(trained)
    train(trained, optimizer)

    assert evaluations(watched) == [(IN_MODE, -1, schema.HOST)]
    (evaluation,) = watched.rows(schema.EVALUATION)
    steps = {row.step: row for row in watched.rows(schema.STEP)}
    work = max(row.end for row in watched.rows(schema.BETWEEN))  # it lies before the work of the step
    assert steps[1].end == steps[2].start <= evaluation.start < evaluation.end <= work < steps[2].end
    assert watched.tracer.innermost is None


def test_a_mode_in_which_something_is_trained_is_no_evaluation(watched: Recording) -> None:
    trained, teacher = model(), model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    teacher.eval()
    for _ in range(2):
        trained.eval()  # frozen batch norms
        teacher.eval()
        train(trained, optimizer, iterations=1)
        trained.train()
    teacher.train()
    trained.eval()
    trained.eval()
    teacher.eval()
    trained.train()  # an evaluation with a teacher
    del teacher
    trained.eval()  # and one that never ends

    assert evaluations(watched) == [(IN_MODE, 2, schema.HOST)]


def synchronise() -> None:
    dist.all_reduce(torch.ones(2))


def steps_of_communication(recording: Recording) -> list[int]:
    return [row.step for row in recording.rows(schema.COLLECTIVE)]


def train_and_communicate(trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    result = trained(batch())
    synchronise()
    result.sum().backward()
    optimizer.step()


def test_an_evaluation_between_two_steps_communicates_for_neither(looping: Recording) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with looping.capturing():
        train(trained, optimizer, iterations=1)
        train_and_communicate(trained, optimizer)
        trained.eval()
        with torch.no_grad():
            trained(batch())
            synchronise()
        trained.train()
        synchronise()  # before the first work of the next step
        train_and_communicate(trained, optimizer)

    assert steps_of_communication(looping) == [1, -1, 2, 2]
    (evaluation,) = looping.rows(schema.EVALUATION)
    between = looping.rows(schema.BETWEEN)
    assert evaluation.step == -1
    assert {row.step for row in between} == {2}
    assert evaluation.end <= max(row.end for row in between)


def test_an_evaluation_in_every_step_communicates_for_it(looping: Recording) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with looping.capturing():
        for _ in range(3):
            trained.eval()
            synchronise()
            trained.train()
            train_and_communicate(trained, optimizer)

    assert steps_of_communication(looping) == [-1, -1, 1, 1, 2, 2]  # the first step begins with its backward


@pytest.mark.parametrize("frozen", [1, 40])
def test_modules_frozen_in_every_step_take_no_communication_from_it(looping: Recording, frozen: int) -> None:
    parts = [nn.BatchNorm1d(8) for _ in range(frozen)]
    trained = nn.Sequential(*parts, model())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with looping.capturing():
        for _ in range(3):
            for part in parts:
                part.train()
                part.eval()
            train_and_communicate(trained, optimizer)

    assert steps_of_communication(looping) == [-1, 1, 2]


def test_averaged_weights_that_stay_in_evaluation_mode_take_no_communication_from_a_step(looping: Recording) -> None:
    trained, averaged = model(), model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with looping.capturing():
        for _ in range(3):
            train_and_communicate(trained, optimizer)
            averaged.eval()
            synchronise()

    assert steps_of_communication(looping) == [-1, 1, 1, 2, 2, 3]


def test_a_forward_that_trains_nothing_communicates_for_no_step(looping: Recording) -> None:
    trained = FullyShardedDataParallel(model(), device_id=CPU)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    averaged = FullyShardedDataParallel(model(), device_id=CPU).eval()
    with looping.capturing():
        train(trained, optimizer)
        before = len(looping.rows(schema.COLLECTIVE))
        with torch.no_grad():
            averaged(batch())
        of_evaluation = looping.rows(schema.COLLECTIVE)[before:]
        train(trained, optimizer)

    assert {row.name for row in of_evaluation} == {"all_gather"}
    assert {row.step for row in of_evaluation} == {-1}
    (evaluation,) = looping.rows(schema.EVALUATION)
    assert evaluation.step == -1
    assert {row.step for row in looping.rows(schema.COLLECTIVE)[before + len(of_evaluation) :]} == {2, 3}
    assert {row.step for row in looping.rows(schema.FORWARD)} == {0, 1, 2, 3}


class Wider(nn.Sequential):
    """A signature of its own, and a part that stays frozen."""

    def train(self, mode: bool = True, *, frozen: bool = True) -> Wider:
        super().train(mode=mode)
        if frozen:
            self[0].eval()
        return self


def test_modes_of_classes_with_signatures_of_their_own(watched: Recording) -> None:
    trained = Wider(nn.BatchNorm1d(8), model())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    train(trained, optimizer)
    trained.train(mode=False, frozen=False)
    trained.train(frozen=True)
    train(trained, optimizer)
    trained.train(False)
    trained.train(mode=True)
    train(trained, optimizer)

    assert [name for name, _, _ in evaluations(watched)] == [IN_MODE] * 2
    assert [module.training for module in trained] == [False, True]


class Refusing(nn.Linear):
    def train(self, mode: bool = True) -> Refusing:
        raise RuntimeError("not now")


def test_a_change_of_mode_that_raises_leaves_nothing_behind(watched: Recording) -> None:
    trained = model()
    with pytest.raises(RuntimeError, match="not now"):
        nn.Sequential(Refusing(8, 8)).eval()
    trained.train(False)
    trained.train()

    assert [name for name, _, _ in evaluations(watched)] == [IN_MODE]


def test_models_of_other_threads_are_no_part_of_the_training(watched: Recording) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def train(self, mode: bool = True) -> Slow:
            inside.set()
            go_on.wait(10)
            super().train(mode)
            return self

    thread = threading.Thread(target=nn.Sequential(Slow()).eval)
    thread.start()
    inside.wait(10)
    trained = model()
    trained.train(False)  # while the other one is in the middle of it
    go_on.set()
    thread.join()
    trained.train()

    assert [name for name, _, _ in evaluations(watched)] == [IN_MODE]


def test_evaluations_of_a_framework_are_its_own(watched: Recording) -> None:
    watched.tracer.begin_step(0)
    evaluate(model())

    assert evaluations(watched) == []


def test_an_evaluation_outside_of_the_window_is_not_recorded() -> None:
    recording = Recording(steps="5:6")
    uninstall = loop.install(recording.tracer)
    evaluate(model())
    uninstall()

    assert evaluations(recording) == []
    assert recording.warnings() == []


def raise_as_gloo_does() -> None:
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("of_framework", [False, True])
def test_communication_of_a_backward_that_raises_has_failed(alone: Recording, of_framework: bool) -> None:
    """It waits in C++: only the exception that comes out of the backward tells."""
    reducer = ReducerCapture(alone.tracer, CppCalls(alone.tracer))
    reducer.install()
    trained = DistributedDataParallel(model())
    if of_framework:
        alone.tracer.begin_step(0)
    values = batch().requires_grad_() * 1
    queue = torch.autograd.Variable._execution_engine.queue_callback
    values.register_hook(
        lambda _: queue(raise_as_gloo_does)
    )  # runs where the reducer waits, as it queued itself before

    with pytest.raises(RuntimeError, match="closed by peer"):
        trained(values).sum().backward()

    alone.tracer.completions.wait(5)
    reducer.uninstall()
    alone.recorder.flush()
    (failed,) = [json.loads(row.detail or "") for row in alone.sink.rows if row[:2] == (schema.MARK, "failed")]
    assert (failed["operation"], failed["exception"]) == ("all_reduce", "RuntimeError")
    assert alone.tracer.blocked == [None]


def test_the_backward_of_a_checkpoint_inside_a_backward_is_part_of_it(looping: Recording) -> None:
    from torch.utils.checkpoint import checkpoint

    inner = model()
    checkpoint(inner, batch().requires_grad_(), use_reentrant=True).sum().backward()

    assert work(looping) == [("backward", 0, 0)]


def test_a_framework_that_marks_steps_has_its_own_spans(alone: Recording) -> None:
    trained = DistributedDataParallel(model())
    alone.tracer.begin_step(0)
    trained(batch()).sum().backward()

    assert work(alone) == []


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState, "_reset_iter_state"),
    reason="this torch does not begin again after a forward that raised",
)
def test_a_forward_that_raises_ends_its_span(looping: Recording) -> None:
    def innermost() -> Any:
        return looping.tracer.innermost

    trained: Any = model()
    fully_shard(trained, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(RuntimeError):
        trained(torch.ones(2, 3))
    assert innermost() is not None
    trained._get_fsdp_state()._reset_iter_state()
    trained(batch())

    assert innermost() is None
    assert [kind for kind, _, _ in work(looping)] == ["forward"] * 2


def test_a_forward_of_fully_sharded_data_parallel_that_raises_ends_its_span(looping: Recording) -> None:
    wrapped = FullyShardedDataParallel(model(), device_id=CPU)
    with pytest.raises(RuntimeError):
        wrapped(torch.ones(2, 3))

    assert looping.tracer.innermost is None
    assert [kind for kind, _, _ in work(looping)] == ["forward"]


def test_everything_is_put_back(recording: Recording) -> None:
    owners: list[tuple[Any, str]] = [
        (nn.Module, "eval"), (nn.Module, "train"), (torch.autograd, "backward"),
        (DistributedDataParallel, "forward"), (FullyShardedDataParallel, "forward"),
        (torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState, "_root_pre_forward"),
    ]  # fmt: skip
    before = [vars(owner)[name] for owner, name in owners]
    uninstall = loop.install(recording.tracer)
    assert all(vars(owner)[name] is not was for (owner, name), was in zip(owners, before, strict=True))

    uninstall()

    assert [vars(owner)[name] for owner, name in owners] == before


class Doubling(nn.Linear):
    """Its forward is no code of torch's, so that dynamo compiles it."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(values)


def fully_sharded() -> nn.Sequential:
    layers = nn.Sequential(Doubling(8, 8), Doubling(8, 4))
    mesh = init_device_mesh("cpu", (1,))
    for module in (*layers, layers):
        fully_shard(module, mesh=mesh)
    return layers


def graphs_of_compiled_models() -> int:
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    trained = DistributedDataParallel(Doubling(8, 4))
    torch.compile(trained, backend=backend)(batch()).sum().backward()
    torch.compile(Doubling(8, 4), backend=backend, fullgraph=True)(batch()).sum().backward()
    torch.compile(lambda values: trained(values).sum().backward(), backend=backend)(batch())
    torch._dynamo.reset()
    switching = Doubling(8, 4)
    torch.compile(lambda values: switching.eval()(values) + switching.train()(values), backend=backend)(batch())
    torch._dynamo.reset()
    torch.compile(fully_sharded(), backend=backend)(batch()).sum().backward()
    torch._dynamo.reset()
    sharded = fully_sharded()
    for layer in sharded:
        layer.compile(backend=backend, fullgraph=True)
    sharded(batch()).sum().backward()
    torch._dynamo.reset()
    return len(graphs)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo's own
def test_compiled_models_are_compiled_as_ever() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphs = graphs_of_compiled_models()
    recording = Recording()
    uninstall = loop.install(recording.tracer)
    graphs_with_commtrace = graphs_of_compiled_models()
    uninstall()
    dist.destroy_process_group()

    assert graphs_with_commtrace == graphs > 4
    assert [kind for kind, _, _ in work(recording)][:3] == ["forward", "backward", "backward"]
    assert recording.warnings() == []


def test_a_recording_may_start_while_dynamo_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    disabled: list[Any] = []
    recording, dynamo = Recording(), ModuleType("torch._dynamo")
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
    uninstall = loop.install(recording.tracer)
    loss = model()(batch()).sum()
    loss.backward(retain_graph=True)

    def disable(function: Any) -> Any:
        disabled.append(function)
        return function

    monkeypatch.setattr(dynamo, "disable", disable, raising=False)
    loss.backward(retain_graph=True)
    assert len(disabled) == 2
    loss.backward()
    uninstall()

    assert len(disabled) == 2
    assert [kind for kind, _, _ in work(recording)] == ["backward"] * 3
    assert recording.warnings() == []


class WithHead(nn.Module):
    """A model whose head is called by the loss, in chunks, as torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.body(inputs))
        return hidden


def sharded_with_head(*, in_one_group: bool = True) -> WithHead:
    trained = WithHead()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(trained.body, mesh=mesh)
    if in_one_group:
        fully_shard([trained.norm, trained.head], mesh=mesh)
    else:
        fully_shard(trained.norm, mesh=mesh)
        fully_shard(trained.head, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    return trained


def train_in_chunks(trained: WithHead, optimizer: torch.optim.Optimizer, chunks: int) -> None:
    hidden = trained(torch.ones(chunks, 8))
    detached = hidden.detach().requires_grad_()
    for chunk in detached.chunk(chunks):
        trained.head(chunk).sum().backward()
    hidden.backward(detached.grad)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("in_one_group", [True, False])
def test_a_head_that_the_loss_calls_has_forwards_of_its_own(looping: Recording, in_one_group: bool) -> None:
    trained = sharded_with_head(in_one_group=in_one_group)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(2):
        train_in_chunks(trained, optimizer, chunks=2)

    iteration = [
        ("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2),
        ("optimizer", -1),
    ]  # fmt: skip
    assert [(kind, microbatch) for kind, step, microbatch in work(looping) if step == 1] == iteration
    assert len(work(looping)) == 2 * len(iteration)
    assert looping.tracer.innermost is None


def test_a_head_that_is_evaluated_in_chunks_leaves_no_evaluation_open(looping: Recording) -> None:
    trained = sharded_with_head()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    train_in_chunks(trained, optimizer, chunks=2)
    trained.eval()
    with torch.no_grad():
        for _ in range(2):
            hidden = trained(batch())
            for chunk in (hidden, hidden, hidden):
                trained.head(chunk)
                assert looping.tracer.innermost is None
    trained.train()
    train_in_chunks(trained, optimizer, chunks=2)

    assert [row.name for row in looping.rows(schema.EVALUATION)] == ["evaluation"] * 8 + [IN_MODE]
    assert len(looping.rows(schema.FORWARD)) == len(looping.rows(schema.BACKWARD)) == 6


def test_a_backward_ends_a_forward_whose_return_was_not_seen(recording: Recording) -> None:
    """The hooks of a model that was sharded before the recording are not all ours."""
    with fake_backend(rank=1):
        trained = sharded_with_head()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        uninstall = loop.install(recording.tracer)
        phase = OptimizerPhase(recording.tracer)
        phase.install()
        for _ in range(2):
            train_in_chunks(trained, optimizer, chunks=2)
        phase.uninstall()
        uninstall()

    assert len(recording.rows(schema.FORWARD)) == len(recording.rows(schema.BACKWARD)) == 6
    assert recording.warnings() == []
