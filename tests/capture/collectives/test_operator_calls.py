"""Functional collectives that Python calls are seen in the operators, exactly once, and nothing of it stays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from commtrace.capture import threads
from commtrace.capture.collectives.functional import FunctionalCapture, FunctionalWaits
from commtrace.capture.collectives.operator_calls import OperatorCall, OperatorCalls
from tests.capture.recording import Recording, fake_backend
from tests.process_groups import world_group

OPERATIONS: Any = torch.ops._c10d_functional
WITH_GRADIENTS: Any = torch.ops._c10d_functional_autograd


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_backend(world_size=2):
        yield


@pytest.fixture
def capture(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> Iterator[FunctionalCapture]:
    monkeypatch.setattr(threads, "other_threads", lambda: set[int]())  # pytest has threads of its own
    capture = FunctionalCapture(recording.tracer, FunctionalWaits(recording.tracer))
    with recording.capturing():  # without which the native part has nothing to record with
        capture.install()
        try:
            yield capture
        finally:
            capture.uninstall()
            assert recording.warnings() == []


def world() -> str:
    return str(world_group().group_name)


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = OPERATIONS.all_reduce(tensor, "sum", world())
    return result


def seen(recording: Recording) -> list[tuple[str, int, int]]:
    return [(row.name, row.seq, row.bytes) for row in recording.communications()]


def waited(recording: Recording, result: torch.Tensor) -> list[tuple[str, int, int]]:
    OPERATIONS.wait_tensor(result)
    return seen(recording)


def has_kernels() -> bool:
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"_c10d_functional::{name}", "BackendSelect")
        for name in ("all_reduce", "all_to_all_single", "wait_tensor")
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda tensor: OPERATIONS.all_reduce(tensor, "sum", world()),
        lambda tensor: OPERATIONS.all_reduce.default(tensor, "sum", world()),
        lambda tensor: functions.all_reduce(tensor, "sum", world_group()),
        lambda tensor: OPERATIONS.all_reduce(tensor, reduce_op="sum", group_name=world()),
        lambda tensor: OPERATIONS.all_reduce.default(input=tensor, group_name=world(), reduce_op="sum"),
    ],
)
def test_an_operator_is_seen_however_it_is_called(
    recording: Recording, capture: FunctionalCapture, call: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert waited(recording, call(torch.ones(2))) == [("all_reduce", 0, 8)]
    assert len(recording.stalls()) == 1
    assert not has_kernels()


def test_an_operators_earlier_kernel_is_put_back() -> None:
    operators = (OPERATIONS.all_reduce, OPERATIONS.all_reduce.default)
    before = [(operator._op, hash(operator), hash(operator._op)) for operator in operators]
    calls = OperatorCalls()
    calls.take(OPERATIONS.all_reduce.default, lambda original, arguments, keywords: "captured")

    assert [hash(operator) for operator in operators] == [number for _, number, _ in before]
    assert [operator("whatever") for operator in operators] == ["captured", "captured"]
    assert OPERATIONS.all_reduce.op.__name__ == before[0][0].__name__
    calls.release()

    assert [(operator._op, hash(operator), hash(operator._op)) for operator in operators] == before
    assert not calls


def test_a_kernel_of_other_code_stays_in_its_operator() -> None:
    overload = OPERATIONS.all_reduce.default
    original, calls = overload._op, OperatorCalls()
    calls.take(overload, lambda original, arguments, keywords: "captured")
    ours = overload._op
    overload._op = theirs = OperatorCall(ours, None)
    try:
        calls.release()
        assert overload._op is theirs
        assert overload(torch.ones(2), "sum", world()).tolist() == [1.0, 1.0]
    finally:
        overload._op = original


class Passing(TorchDispatchMode):
    """Hands every operator on, as CommDebugMode does."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return operator(*arguments, **(keywords or {}))


class PassingFunctions(TorchFunctionMode):
    """As ``with torch.device(…)`` does."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*arguments, **(keywords or {}))


class Swallowing(TorchDispatchMode):
    """Sends nothing."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return torch.zeros(2)


class Named(torch.Tensor):
    """A class of tensors that handles functions, as torch.Tensor has it."""


class Held(torch.Tensor):
    """Holds another tensor, and hands operators on to that."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Held:
        made: Held = torch.Tensor._make_wrapper_subclass(cls, held.size())
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = [argument.held if isinstance(argument, Held) else argument for argument in args]
        return func(*arguments, **(kwargs or {}))


@pytest.mark.parametrize("modes", [(Passing,), (Passing, Passing), (PassingFunctions,), (PassingFunctions, Passing)])
def test_an_operator_under_modes_is_seen_once(
    recording: Recording, capture: FunctionalCapture, modes: tuple[type[Any], ...]
) -> None:
    entered = [mode() for mode in modes]
    for mode in entered:
        mode.__enter__()
    try:
        found = waited(recording, all_reduce(torch.ones(2)))
    finally:
        for mode in reversed(entered):
            mode.__exit__(None, None, None)

    assert found == [("all_reduce", 0, 8)]


@pytest.mark.parametrize("make", [Held, lambda tensor: tensor.as_subclass(Named), torch.nn.Parameter])
def test_a_tensor_of_another_class_is_seen_once(
    recording: Recording, capture: FunctionalCapture, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert waited(recording, all_reduce(make(torch.ones(2)))) == [("all_reduce", 0, 8)]


def test_calls_that_a_mode_keeps_to_itself_are_not_counted(recording: Recording, capture: FunctionalCapture) -> None:
    with Swallowing():
        all_reduce(torch.ones(2))

    assert waited(recording, all_reduce(torch.ones(3))) == [("all_reduce", 0, 12)]


def test_traced_calls_are_not_counted(recording: Recording, capture: FunctionalCapture) -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = OPERATIONS.wait_tensor(all_reduce(tensor)) + 1
        return result

    with FakeTensorMode() as mode:
        step(torch.ones(2))
        step(mode.from_tensor(torch.ones(2)))
    step(torch.ones(2, device="meta"))
    graph = make_fx(step, tracing_mode="fake")(torch.ones(2))
    assert seen(recording) == []

    assert graph(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen(recording) == [("all_reduce", 0, 8)]


def test_a_graph_of_the_compiler_is_seen_when_it_runs(recording: Recording, capture: FunctionalCapture) -> None:
    group: Any = "0"

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functions.all_reduce(tensor, "sum", group) + 1
        return result

    for _ in range(2):
        assert step(torch.ones(2)).tolist() == [2.0, 2.0]

    assert seen(recording) == [("all_reduce", 0, 8), ("all_reduce", 1, 8)]
    assert not has_kernels()


@pytest.mark.filterwarnings("ignore:_c10d_functional..wait_tensor. an autograd kernel was not registered:UserWarning")
def test_operators_with_gradients_are_seen_and_what_their_backwards_send(
    recording: Recording, capture: FunctionalCapture
) -> None:
    """In older versions of torch C++ calls operators for them, which takes kernels."""
    tensor = torch.ones(4, requires_grad=True)
    result = WITH_GRADIENTS.all_to_all_single(tensor, [1, 3], [1, 3], world())
    OPERATIONS.wait_tensor(result).sum().backward()
    all_reduce(torch.ones(2))

    capture.uninstall()  # which gives what nobody has waited for a row
    assert sorted(seen(recording), key=lambda row: row[1]) == [
        ("all_to_all", 0, 16), ("all_to_all", 1, 16), ("all_reduce", 2, 8),
    ]  # fmt: skip
    assert not has_kernels()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_calls_of_a_transform_from_cpp_are_seen(recording: Recording, capture: FunctionalCapture) -> None:
    result = torch.func.vmap(lambda tensor: all_reduce(tensor))(torch.ones(3, 2))

    capture.uninstall()  # which gives what nobody has waited for a row
    assert result.tolist() == [[1.0, 1.0]] * 3
    assert seen(recording) == [("all_reduce", number, 8) for number in range(3)]


def test_a_script_may_call_an_operator_while_it_is_captured(recording: Recording, capture: FunctionalCapture) -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.all_reduce(tensor, "sum", "0")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated in newer versions
        script = torch.jit.script(step)

    assert script(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_call_that_is_refused_takes_no_number(recording: Recording, capture: FunctionalCapture) -> None:
    with pytest.raises(RuntimeError):
        OPERATIONS.all_reduce(torch.ones(2), "no such reduction", world())

    assert waited(recording, all_reduce(torch.ones(2))) == [("all_reduce", 0, 8)]
