"""Whatever a caller hands to a method of ``ProcessGroup`` or ``Work``, it gets what the original gives: a result of the
same type, or an exception of the same type with the same text."""

from __future__ import annotations

import functools
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup, Work

from commtrace.capture.native import METHODS
from tests.capture.recording import Recording
from tests.unreadable import unreadable

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("native_engine", "world")]


class UnreadableTensor(torch.Tensor):
    """A subclass whose attributes raise."""

    nbytes = unreadable(ValueError("nobody may ask"))


class UnreadableOptions:
    def __init__(self, error: type[Exception] = AttributeError) -> None:
        self.error = error

    @property
    def asyncOp(self) -> bool:  # noqa: N802
        raise self.error("no such option")

    @property
    def rootRank(self) -> int:  # noqa: N802
        raise self.error("no such rank")


class Index:
    """An integer that runs Python, or raises there."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __index__(self) -> int:
        if self.number is None:
            raise ValueError("no number")
        return self.number


@functools.cache
def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@functools.cache  # it takes a millisecond
def quantised_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)


TENSORS: list[Callable[[], object]] = [
    lambda: torch.zeros(4),
    lambda: torch.zeros(16),
    lambda: torch.zeros(0),
    lambda: torch.zeros(2, 3).t(),
    lambda: torch.zeros(4, dtype=torch.complex64),
    lambda: torch.zeros(4, dtype=torch.bool),
    lambda: torch.zeros(4, requires_grad=True),
    lambda: torch.nn.Parameter(torch.zeros(4)),
    lambda: torch.zeros(4, device="meta"),
    lambda: torch.eye(3).to_sparse(),
    nested_tensor,
    quantised_tensor,
    lambda: torch.zeros(4).as_subclass(UnreadableTensor),
]

OPTIONS: list[Callable[[], object]] = [
    dist.AllreduceOptions, dist.BroadcastOptions, dist.ReduceOptions, dist.AllToAllOptions,
    dist.ReduceScatterOptions, AllgatherOptions, UnreadableOptions, lambda: SimpleNamespace(asyncOp=False),
]  # fmt: skip

NUMBERS: list[Callable[[], object]] = [
    itertools.repeat(number).__next__ for number in (-1, 0, 1, 3, 4, 2**31, 2**40, 2**70, True, 1.5, "1", None)
]
NUMBERS += [lambda: Index(1), lambda: Index(None)]


class Arguments:
    """Random arguments; the same ones again for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def tensor(self) -> object:
        return self.random.choice(TENSORS)()

    def tensors(self) -> object:
        number = self.random.choice([0, 1, 1, 1, 1, 2])
        tensors = [self.tensor() for _ in range(number)]
        return self.random.choice(
            [tensors, tensors, tensors, tuple(tensors), [tensors], [None], tensors and tensors[0]]
        )

    def options(self, usual: Callable[[], Any] | None = None) -> object:
        options: Any = usual() if usual is not None and self.random.random() < 0.8 else self.random.choice(OPTIONS)()
        for name, value in (("asyncOp", self.random.random() < 0.3), ("rootRank", self.random.choice([0, 3, 9, -2]))):
            if hasattr(type(options), name) and not isinstance(options, UnreadableOptions):
                setattr(options, name, value)
        return options

    def anything(self) -> object:
        make = self.random.choice([self.tensor, self.tensors, self.options, lambda: self.random.choice(NUMBERS)()])
        return make()

    def usual(self, name: str) -> list[object]:
        tensor, options = self.tensor, self.options
        by_name: dict[str, Callable[[], list[object]]] = {
            "allreduce": lambda: [[tensor()], options(dist.AllreduceOptions)],
            "broadcast": lambda: [[tensor()], options(dist.BroadcastOptions)],
            "reduce": lambda: [[tensor()], options(dist.ReduceOptions)],
            "_allgather_base": lambda: [tensor(), tensor(), options(AllgatherOptions)],
            "_reduce_scatter_base": lambda: [tensor(), tensor(), options(dist.ReduceScatterOptions)],
            "alltoall_base": lambda: [
                tensor(),
                tensor(),
                [],
                self.random.choice([[], [1]]),
                options(dist.AllToAllOptions),
            ],
            "send": lambda: [[tensor()], self.random.choice(NUMBERS)(), self.random.choice(NUMBERS)()],
        }
        names = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base",
                 "all_to_all_single": "alltoall_base", "recv": "send"}  # fmt: skip
        return by_name.get(names.get(name, name), lambda: [[tensor()], options()])()

    def call(self, name: str) -> tuple[list[object], dict[str, object]]:
        arguments = self.usual(name)
        if self.random.random() < 0.2:
            arguments = [self.anything() for _ in range(self.random.randrange(16))]
        for _ in range(self.random.choice([0, 0, 1, 2])):
            if arguments:
                arguments[self.random.randrange(len(arguments))] = self.anything()
        keywords = {}
        if self.random.random() < 0.15:
            keyword = self.random.choice(["opts", "tensors", "timeout", "tag", "no_such_name"])
            keywords[keyword] = self.anything() if not arguments or self.random.random() < 0.3 else arguments.pop()
        return arguments, keywords


ADDRESS = re.compile(r"0x[0-9a-f]+")


def outcome(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[str, str]:
    """What a caller sees of a call: the type of the result, or of the exception, and its text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = function(*arguments, **keywords)
        except Exception as error:
            return type(error).__qualname__, ADDRESS.sub("", str(error))
    return type(result).__qualname__, "" if isinstance(result, Work) else repr(result)


def unlike(
    methods: list[tuple[str, Any]], receivers: Callable[[str], object], num_calls: int, seed: int, recording: Recording
) -> Iterator[str]:
    """Yield calls whose outcome is another one than the original's."""
    for number in range(num_calls):
        name, original = methods[number % len(methods)]
        outcomes = []
        for function in (original, getattr(type(receivers(name)), name)):
            # Made anew: a call may change its arguments.
            arguments, keywords = Arguments(seed + number).call(name)
            outcomes.append(outcome(function, receivers(name), *arguments, **keywords))
        if outcomes[0] != outcomes[1]:
            yield f"{name}, seed {seed + number}: {outcomes[0]} and {outcomes[1]}"
        if number % 1_000 == 999:
            recording.recorder.flush()


def originals(owner: type, names: list[str]) -> list[tuple[str, Any]]:
    return [(name, owner.__dict__[name].__func__) for name in names if name in owner.__dict__]


@pytest.mark.parametrize("num_calls", [1_000, pytest.param(8_000, marks=pytest.mark.thorough)])
def test_methods_of_process_groups_do_as_the_originals(num_calls: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    methods = originals(
        ProcessGroup, [*METHODS, "allgather", "reduce_scatter", "alltoall", "gather", "scatter", "barrier"]
    )
    recording = Recording(capacity=1_000_000)
    with recording.capturing():
        differences = list(unlike(methods, lambda _: group, num_calls, 1, recording))
        warned = recording.warnings()

    assert differences == []
    assert [text for text in warned if "cannot be read" not in text] == []
    assert len(recording.communications()) > num_calls / 20


@pytest.mark.parametrize("name", ["allreduce", "send"])
def test_methods_without_an_object_do_as_the_originals(name: str) -> None:
    [(_, original)] = originals(ProcessGroup, [name])
    with Recording().capturing():
        assert outcome(getattr(ProcessGroup, name)) == outcome(original)


def test_arguments_that_nobody_can_read_end_the_capture_and_nothing_else() -> None:
    group = dist.group.WORLD
    [(_, original)] = originals(ProcessGroup, ["allreduce"])
    recording = Recording()
    with recording.capturing():
        expected = outcome(original, group, [torch.zeros(4)], UnreadableOptions(LookupError))
        for _ in range(3):
            assert outcome(ProcessGroup.allreduce, group, [torch.zeros(4)], UnreadableOptions(LookupError)) == expected
        [warning] = recording.warnings()

    assert warning.startswith("capture of communication is switched off for the rest of this run: LookupError")


@pytest.mark.parametrize("num_calls", [1_000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_waits_do_as_the_originals(num_calls: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    [(_, original)] = originals(Work, ["wait"])
    chosen = random.Random(2)
    arguments: list[tuple[Any, ...]] = [
        (), (timedelta(seconds=1),), (timedelta(0),), ("soon",), (1,), (None,), (timedelta(1), 2), (1,) * 15,
    ]  # fmt: skip
    keywords: list[dict[str, Any]] = [{}, {}, {"timeout": timedelta(seconds=1)}, {"timeout": 3}, {"no_such_name": 1}]
    differences = []
    recording = Recording(capacity=1_000_000)
    with recording.capturing():
        for _ in range(num_calls):
            options = dist.AllreduceOptions()
            options.asyncOp = chosen.random() < 0.5
            work = group.allreduce([torch.zeros(4)], options)
            positional, named = chosen.choice(arguments), chosen.choice(keywords)
            receiver = [] if chosen.random() < 0.05 else [work if chosen.random() < 0.9 else group]
            expected = outcome(original, *receiver, *positional, **named)
            for _ in range(chosen.randrange(3)):
                given = outcome(Work.wait, *receiver, *positional, **named)
                if given != expected:
                    differences.append(f"{receiver} {positional} {named}: {expected} and {given}")
        warned = recording.warnings()

    assert differences == []
    assert warned == []
