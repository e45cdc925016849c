"""Forward and backward of modules: each call once, whatever torch or others do around it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commtrace.capture.hooks import keep_compiler_out
from commtrace.capture.model import module_backward, modules, native_modules
from commtrace.capture.model.modules import ModuleSpans
from commtrace.capture.model.optimizers import OptimizerPhase
from commtrace.trace import schema
from tests.capture.recording import Recording
from tests.capture.simulated_cuda import MILLISECOND, SimulatedCuda
from tests.unreadable import unreadable


class Block(nn.Module):
    """Two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Net(nn.Module):
    def __init__(self, blocks: int = 2, *, recompute: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.recompute(layer, x) if self.recompute else layer(x)
        return x.sum()


TOKENS = torch.tensor([1, 2, 3])


@pytest.fixture(autouse=True)
def no_models_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's cache holds some, and errors that torch keeps hold the frames in which they were raised."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    find_all = modules.find_models
    of_others = weakref.WeakSet(find_all())
    monkeypatch.setattr(modules, "find_models", lambda: [model for model in find_all() if model not in of_others])


@pytest.fixture
def spans(recording: Recording) -> Iterator[ModuleSpans]:
    modules = ModuleSpans(recording.tracer)
    recording.tracer.begin_step(0)
    yield modules
    modules.clear()
    assert recording.warnings() == []


def recorded_names(recording: Recording) -> list[str]:
    """Names in order of their start, those around others first."""
    rows = recording.rows(schema.MODULE)
    return [row.name for row in sorted(rows, key=lambda row: (row.start, -row.end))]


def assert_nested(recording: Recording) -> None:
    """No span overlaps another one without holding it."""
    open_ends: list[int] = []
    for row in sorted(recording.rows(schema.MODULE), key=lambda row: (row.start, -row.end)):
        while open_ends and open_ends[-1] <= row.start:
            open_ends.pop()
        assert not open_ends or row.end <= open_ends[-1]
        open_ends.append(row.end)


def test_forward_and_backward_of_every_module_once(recording: Recording, spans: ModuleSpans) -> None:
    net = Net()
    spans.select("depth=2")
    assert spans.names == [
        "Net", "embed", *(f"layers.{n}{part}" for n in (0, 1) for part in ("", ".first", ".second")),
    ]  # fmt: skip

    net(TOKENS).backward()

    assert recorded_names(recording) == [
        "Net", "embed", "layers.0", "layers.0.first", "layers.0.second", "layers.1", "layers.1.first",
        "layers.1.second",
        "Net backward", "layers.1 backward", "layers.1.second backward", "layers.1.first backward",
        "layers.0 backward", "layers.0.second backward", "layers.0.first backward", "embed backward",
    ]  # fmt: skip
    assert_nested(recording)
    rows = recording.rows(schema.MODULE)
    assert {(row.lane, row.step, row.timing) for row in rows} == {(schema.COMPUTE, 0, schema.HOST_TIMING)}


def test_a_backward_ends_when_the_gradient_of_its_input_is_complete(recording: Recording, spans: ModuleSpans) -> None:
    class Slow(torch.autograd.Function):
        """Between two modules, and long."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            entered.append(recording.num_added)
            return gradient

    entered: list[int] = []
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleDict({"first": first, "second": second})
    spans.select("first,second")
    second(Slow.apply(first(torch.ones(1, 2)))).sum().backward()

    assert recorded_names(recording) == ["first", "second", "second backward", "first backward"]
    assert entered == [3]  # two forwards and one backward had ended: the gap belongs to no module
    assert len(model) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_is_no_forward(recording: Recording, spans: ModuleSpans, reentrant: bool) -> None:
    net = Net(recompute=lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    spans.select("layers.*,first")
    net(TOKENS).backward()

    names = recorded_names(recording)
    assert sorted(names) == sorted(
        f"layers.{n}{part}{way}" for n in (0, 1) for part in ("", ".first") for way in ("", " recompute", " backward")
    )
    # The repeated forward stands inside the backward that needs it, unless that belongs to the repeated graph.
    order = ["layers.1 recompute", "layers.1.first recompute", "layers.1 backward", "layers.1.first backward"]
    if not reentrant:
        order = [order[2], order[0], order[1], order[3]]
    assert [name for name in names if name.startswith("layers.1") and " " in name] == order
    assert_nested(recording)


def test_modules_that_are_called_twice(recording: Recording, spans: ModuleSpans) -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    spans.select("depth=1")
    model(torch.ones(1, 4)).sum().backward()

    assert recorded_names(recording) == [
        "Sequential", "0", "1", "0", "Sequential backward", "0 backward", "1 backward", "0 backward",
    ]  # fmt: skip
    assert_nested(recording)


def test_modules_that_call_themselves(recording: Recording, spans: ModuleSpans) -> None:
    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return 2 * (self(x, depth - 1) if depth else x)

    model = Recursive()
    spans.select("depth=0")
    model(torch.ones(1, requires_grad=True), depth=2).backward()

    assert recorded_names(recording) == ["Recursive"] * 3 + ["Recursive backward"] * 3
    assert_nested(recording)


def test_without_gradients_there_is_no_backward(recording: Recording, spans: ModuleSpans) -> None:
    net = Net(1)
    spans.select("layers.*")
    with torch.no_grad():
        out = net(TOKENS)
    with torch.inference_mode():
        net(TOKENS)

    assert recorded_names(recording) == ["layers.0"] * 2
    assert not out.requires_grad


def test_a_module_that_raises_is_closed_and_nesting_is_right_afterwards(
    recording: Recording, spans: ModuleSpans
) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.numel() > 1:
                raise ZeroDivisionError
            return x * 2

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Raises()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except ZeroDivisionError:
                return self.inner(x[:1])

    model: Any = torch.nn.parallel.DataParallel(Holds()) if torch.cuda.is_available() else Holds()
    spans.select("depth=1")
    for _ in range(2):
        model(torch.ones(2, requires_grad=True)).backward()

    assert recorded_names(recording) == ["Holds", "inner", "inner", "Holds backward", "inner backward"] * 2
    assert_nested(recording)
    with pytest.raises(ZeroDivisionError):
        model.inner(torch.ones(2))
    assert recorded_names(recording)[-1] == "inner"


def test_a_backward_that_raises_leaves_nothing_open(recording: Recording, spans: ModuleSpans) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

    net = Net(1, recompute=lambda layer, x: layer(Fails.apply(x)))
    spans.select("layers.*,embed")
    with pytest.raises(ZeroDivisionError):
        net(TOKENS).backward()
    recording.tracer.begin_step(1)
    net.recompute = None
    net(TOKENS).backward()

    rows = [(row.name, row.step) for row in recording.rows(schema.MODULE)]
    assert [name for name, step in rows if step == 1] == ["embed", "layers.0", "layers.0 backward", "embed backward"]


@dataclass
class Output:
    hidden: Tensor
    cache: Any = None


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x * 2, None),
    "list": lambda x: [None, x * 2],
    "dictionary": lambda x: {"hidden": x * 2, "extra": 3},
    "dataclass": lambda x: Output(x * 2),
    "nested": lambda x: (None, {"a": [x * 2]}),
    "two": lambda x: (x * 2, x * 3),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_arguments_and_outputs_of_any_kind(recording: Recording, spans: ModuleSpans, kind: str) -> None:
    class Gives(nn.Module):
        def forward(self, _nothing: None, *, mask: Any, hidden: Tensor) -> Any:
            return OUTPUTS[kind](hidden)

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict, Output)):
            holds = vars(value) if isinstance(value, Output) else value
            for inner in holds.values() if isinstance(holds, dict) else holds:
                yield from tensors(inner)

    model = Gives()
    spans.select("depth=0")
    x = torch.ones(1, requires_grad=True)
    out = model(None, mask=None, hidden=x * 1)
    sum(tensors(out), torch.zeros(1)).backward()

    assert recorded_names(recording) == ["Gives", "Gives backward"]
    assert x.grad is not None


def test_an_input_that_is_passed_through_does_not_begin_the_backward(recording: Recording, spans: ModuleSpans) -> None:
    class Passes(nn.Module):
        def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, context

    model = nn.ModuleDict({"a": Passes(), "b": Passes()})
    spans.select("a,b")
    x, context = torch.ones(1, requires_grad=True) * 1, torch.ones(1, requires_grad=True) * 1
    for name in ("a", "b"):
        x, context = model[name](x, context)
    (x + context).backward()

    assert recorded_names(recording) == ["a", "b", "b backward", "a backward"]


@pytest.mark.parametrize(("is_view", "names"), [(True, ["Gives"]), (False, ["Gives", "Gives backward"])])
def test_outputs_that_are_changed_in_place_stay_allowed(
    recording: Recording, spans: ModuleSpans, is_view: bool, names: list[str]
) -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1).view(-1) if is_view else x * 1

    model = Gives()
    spans.select("depth=0")
    x = torch.ones(2, 2, requires_grad=True)
    out = model(x * 1)
    out.mul_(3)
    out.sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    # autograd replaces the node of a view that is written to: nobody comes by
    assert recorded_names(recording) == names


def test_hooks_of_others_run_and_belong_to_their_module(recording: Recording, spans: ModuleSpans) -> None:
    net = Net(1)
    heard: list[str] = []
    layer = net.layers[0]

    def on_output(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        output.register_hook(lambda _gradient: heard.append("gradient"))
        return output * 1

    handle = layer.register_forward_hook(on_output)
    layer.register_forward_pre_hook(lambda _module, _arguments: heard.append("before"))
    layer.register_full_backward_hook(lambda *_: heard.append("backward"))
    spans.select("layers.*")
    net(TOKENS).backward()
    handle.remove()
    net(TOKENS).backward()

    assert recorded_names(recording) == ["layers.0", "layers.0 backward"] * 2
    assert heard == ["before", "gradient", "backward", "before", "backward"]


def test_results_are_the_same_bits(recording: Recording, spans: ModuleSpans) -> None:
    def trained() -> list[Tensor]:
        net = Net(3, recompute=lambda layer, x: checkpoint(layer, x, use_reentrant=False))
        optimizer = torch.optim.Adam(net.parameters())
        losses = []
        for _ in range(3):
            recording.tracer.begin_step()
            loss = net(TOKENS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses + [parameter.detach() for parameter in net.parameters()]

    plain = trained()
    spans.select("depth=3")
    recorded = trained()

    assert recorded_names(recording) != []
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))


def test_models_made_later_are_found(recording: Recording, spans: ModuleSpans) -> None:
    optimizers = OptimizerPhase(recording.tracer)
    optimizers.install()
    spans.select("layers.*")
    net = Net(1)
    net(TOKENS).backward()
    assert recorded_names(recording) == []

    torch.optim.SGD(net.parameters()).step()
    optimizers.uninstall()
    net(TOKENS)

    assert recorded_names(recording) == ["layers.0"]


def test_wrappers_have_no_part_in_names_and_are_one_with_what_they_wrap(
    recording: Recording, spans: ModuleSpans
) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *arguments: Any) -> Any:
            return self.module(*arguments)

    net = Net(1)
    net.layers[0] = Wrapper(net.layers[0])
    wrapped = Wrapper(Wrapper(net))
    spans.select("depth=1")
    wrapped(TOKENS).backward()
    wrapper: Any = net.layers[0]
    wrapper.module(torch.ones(1, 4))

    assert recorded_names(recording) == [
        "Net", "embed", "layers.0", "Net backward", "layers.0 backward", "embed backward", "layers.0",
    ]  # fmt: skip


def test_copies_and_pickles_are_right_and_not_recorded(recording: Recording, spans: ModuleSpans) -> None:
    model = nn.Linear(2, 2)
    spans.select("depth=0")
    copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    replica = model._replicate_for_data_parallel()
    with torch.no_grad():
        copies[0].weight.zero_()
        copies[0].bias.zero_()
    outputs = [module(torch.ones(1, 2)) for module in copies]

    assert outputs[0].tolist() == [[0.0, 0.0]]
    assert vars(replica).keys() - {"_is_replica"} == vars(model).keys()
    assert recorded_names(recording) == []
    model(torch.ones(1, 2))
    assert recorded_names(recording) == ["Linear"]


def test_nothing_is_kept_alive(recording: Recording, spans: ModuleSpans) -> None:
    net = Net(1)
    spans.select("depth=2")
    seen: list[Any] = []
    cast(Any, net.layers[0]).first.register_forward_hook(lambda _m, _a, output: seen.append(weakref.ref(output)))
    gc.disable()
    try:
        net(TOKENS)  # no backward comes
        assert [reference() for reference in seen] == [None]
        net(TOKENS).backward()
        assert [reference() for reference in seen] == [None, None]
        parameter = weakref.ref(net.embed)
        del net
    finally:
        gc.enable()
    gc.collect()
    assert parameter() is None
    assert spans.names == []


def test_cleared_every_class_is_as_before(recording: Recording, spans: ModuleSpans) -> None:
    class Own(nn.Linear):
        def _call_impl(self, *arguments: Any, **keywords: Any) -> Any:
            return super()._call_impl(*arguments, **keywords)

    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2))
    owners = (nn.Sequential, nn.Linear, Own, nn.Module)
    before = [owner.__dict__.get("_call_impl") for owner in owners]
    spans.select("depth=1")
    spans.select("depth=1")
    model(torch.ones(1, 2))
    assert recorded_names(recording) == ["Sequential", "0", "1"]
    assert [owner.__dict__.get("_call_impl") for owner in owners] != before

    spans.clear()
    spans.clear()

    assert [owner.__dict__.get("_call_impl") for owner in owners] == before
    assert recording.tracer.step_listeners == []
    model(torch.ones(1, 2)).sum().backward()
    assert len(recorded_names(recording)) == 3


def test_outside_of_the_window_nothing_is_recorded() -> None:
    recording = Recording(steps="1:2")
    modules = ModuleSpans(recording.tracer)
    net = Net(1)
    modules.select("layers.*")
    for step in range(3):
        recording.tracer.begin_step(step)
        net(TOKENS).backward()
    modules.clear()

    assert [(row.name, row.step) for row in recording.rows(schema.MODULE)] == [
        ("layers.0", 1),
        ("layers.0 backward", 1),
    ]


class Runs(nn.Module):
    """Keeps the simulated GPU busy in forward and backward."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self.gpu = cuda
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.gpu.current_stream().run(MILLISECOND)
        out: Tensor = self.inner(x) * 2
        if out.requires_grad:
            out.register_hook(self.runs_longer)
        return out

    def runs_longer(self, _gradient: Tensor) -> None:
        self.gpu.current_stream().run(3 * MILLISECOND)


@pytest.mark.usefixtures("world")
def test_spans_on_a_device_are_timed_by_the_device() -> None:
    cuda = SimulatedCuda()
    recording = Recording(cuda=cuda)
    modules = ModuleSpans(recording.tracer)
    recording.tracer.begin_step(0)
    model = nn.Sequential(Runs(cuda), Runs(cuda))
    modules.select("0,1")
    with recording.capturing():  # which opens the device
        model(torch.ones(1, requires_grad=True) * 1).backward()
        with cuda.graph():
            model(torch.ones(1))
        cuda.advance(20 * MILLISECOND)
        rows = recording.rows(schema.MODULE)
    modules.clear()

    first = min(row.start for row in rows)
    times = {row.name: ((row.start - first) // MILLISECOND, (row.end - first) // MILLISECOND) for row in rows}
    assert times == {"0": (0, 1), "1": (1, 2), "1 backward": (2, 5), "0 backward": (5, 8)}
    assert [row.timing for row in rows] == [schema.CUDA_EVENT_TIMING] * 4  # nothing of the graph
    assert recording.warnings() == []


def test_an_error_of_ours_switches_the_part_off_and_reaches_no_training(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(OrderedDict[Any, Any]):
        def __init__(self) -> None:
            raise ZeroDivisionError("ours")

    if recording.native is None:
        monkeypatch.setattr(module_backward, "OrderedDict", Broken)
    else:
        monkeypatch.setattr(native_modules, "OrderedDict", Broken)
    modules = ModuleSpans(recording.tracer)
    recording.tracer.begin_step(0)
    model, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    modules.select("depth=0")
    model(x * 1).sum().backward()
    modules.clear()

    assert x.grad is not None
    (message,) = recording.warnings()
    assert "ZeroDivisionError: ours" in message


def test_an_interrupt_is_the_jobs(recording: Recording, spans: ModuleSpans) -> None:
    class Interrupts(Tensor):
        grad_fn = unreadable(KeyboardInterrupt())

    model = nn.Identity()
    spans.select("depth=0")
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 2, requires_grad=True).as_subclass(Interrupts))


def test_hooks_of_an_earlier_recording_record_nothing(recording: Recording, spans: ModuleSpans) -> None:
    model = nn.Linear(2, 2)
    spans.select("depth=0")
    loss = model(torch.ones(1, 2)).sum()
    spans.clear()
    recording.rows()
    recording.tracer.recording = False
    later = Recording()
    later.tracer.begin_step(0)
    loss.backward()

    assert recorded_names(later) == []
    assert recorded_names(recording) == ["Linear"]


def test_saving_an_output_warns_of_no_hook_of_ours(recording: Recording, spans: ModuleSpans, tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    spans.select("depth=0")
    out = model(torch.ones(1, 2) * torch.ones(2, requires_grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(out, tmp_path / "out.pt")


def test_compiled_models_neither_break_nor_compile_again(recording: Recording, spans: ModuleSpans) -> None:
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    skipping = keep_compiler_out(recording.tracer)  # as in a session: capture's own files are skipped
    counters.clear()
    counter = CompileCounter()
    net = Net(2)
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    compiled(TOKENS).backward()
    assert counter.frame_count == 1

    spans.select("depth=2")
    compiled(TOKENS).backward()
    assert counter.frame_count == 1
    other = torch.compile(Net(3), backend=counter, fullgraph=True)
    spans.select("depth=2")
    other(TOKENS).backward()  # traced with our replacement in place
    assert counter.frame_count == 2
    spans.clear()
    compiled(TOKENS).backward()
    spans.select("depth=2")
    other(TOKENS)

    skipping()
    assert counter.frame_count == 2
    assert not counters["graph_break"]
    # The graphs of torch 2.4, run by this backend as they are, call modules: recorded as modules of GraphModule.
    names = [name for name in recorded_names(recording) if not name.startswith("GraphModule")]
    assert names == ["Net", "Net backward"] * 2 + ["Net"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_modules_compiled_in_place_are_recorded(recording: Recording, spans: ModuleSpans) -> None:
    torch._dynamo.reset()
    net = Net(2)
    for layer in net.layers:
        layer.compile(backend="eager", fullgraph=True)
    before = [vars(layer)["_compiled_call_impl"] for layer in net.layers]
    spans.select("depth=2")
    net(TOKENS).backward()
    spans.clear()

    assert recorded_names(recording) == [
        "Net", "embed", "layers.0", "layers.1", "Net backward", "layers.1 backward", "layers.0 backward",
        "embed backward",
    ]  # fmt: skip
    assert [vars(layer)["_compiled_call_impl"] for layer in net.layers] == before
