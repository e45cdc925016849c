"""Operators and hooks of the extension, through which it sees what C++ starts, with stand-ins for those of torch."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.trace.schema import COLLECTIVE, STALL
from tests.capture.simulated_nccl import SimulatedTensor, tensor
from tests.native.bare_core import BareCore, ProcessGroup
from tests.native.forked import in_child

pytestmark = pytest.mark.timeout(60)

ALL_REDUCE = 3


class Operators:
    """An operator and its wait, whose uncommon calls are remembered."""

    def __init__(self, core: BareCore) -> None:
        self.core = core
        self.uncommon: list[str] = []
        self.pending: dict[int, object] = {}
        self.forgotten: list[int] = []
        self.modes = 0
        self.transformed = self.functions = False
        core.core.configure_operators(
            failed=core.errors.append, resolve_group=self.resolved, has_function=lambda _tensor: self.functions,
            num_modes=lambda: self.modes, is_transformed=lambda _tensor: self.transformed, pending=self.pending,
            forget_result=self.forgotten.append,
        )  # fmt: skip

    def resolved(self, name: str) -> object:
        return {"0": self.core.process_group}[name]

    def all_reduce(self, original: Callable[..., object], **facts: Any) -> Any:
        usual = {"operation": 0, "name": 0, "num_arguments": 3, "group": 2}
        return self.core.core.Operator(original, self.capturing("launch"), **{**usual, **facts})

    def wait(self, original: Callable[..., object]) -> Any:
        return self.core.core.Operator(original, self.capturing("wait"), is_wait=True, num_arguments=1)

    def capturing(self, name: str) -> Callable[..., object]:
        def capture(original: Callable[..., object], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> object:
            self.uncommon.append(name)
            return original(*arguments, **keywords)

        return capture


@pytest.fixture
def core() -> Iterator[BareCore]:
    bare = BareCore()
    bare.configure(tensor_types=(SimulatedTensor,))
    yield bare
    assert bare.errors == []
    bare.core.end_operators()
    bare.core.end_hooks()
    bare.core.end()


@pytest.fixture
def operators(core: BareCore) -> Operators:
    return Operators(core)


def references(core: BareCore) -> int:
    """Return how many references there are to the counters of the group."""
    return sys.getrefcount(core.counters)


def itself(tensor: Any, *_arguments: object, **_keywords: object) -> Any:
    return tensor


def test_a_call_and_its_wait_are_a_communication_and_a_stall(operators: Operators) -> None:
    all_reduce, wait = operators.all_reduce(itself), operators.wait(itself)
    given = tensor(8, "cpu")
    before = references(operators.core)
    result = all_reduce(given, "sum", "0")
    assert result is given
    del result
    operators.core.core.set_place((4, -1, -1, -1))
    wait(given)
    of_tensor = sys.getrefcount(given)
    assert (references(operators.core), of_tensor) == (before, 2)

    rows = operators.core.take()
    [communication] = [row for row in rows if row["kind"] == COLLECTIVE]
    [stall] = [row for row in rows if row["kind"] == STALL]
    assert (communication["bytes"], communication["seq"], communication["is_async"], communication["step"]) == (
        8,
        0,
        1,
        -1,
    )
    assert (stall["stalled_on"], stall["step"]) == (communication["id"], 4)
    assert communication["start"] <= stall["start"] <= stall["end"] == communication["end"]
    assert operators.uncommon == []


def test_payloads_and_roots_are_those_of_the_operation(operators: Operators) -> None:
    gather = operators.all_reduce(itself, is_per_rank=True)
    broadcast = operators.all_reduce(itself, root=1)
    wait = operators.wait(itself)
    wait(gather(tensor(8, "cpu"), 4, "0"))
    wait(broadcast(tensor(16, "cpu"), 2, operators.core.process_group))
    broadcast(tensor(16, "cpu"), 4, "0")  # no rank of the group: torch refuses it

    rows = operators.core.take(COLLECTIVE)
    assert [(row["bytes"], row["peer"]) for row in rows] == [(32, -1), (16, 2)]
    assert operators.uncommon == ["launch"]


@pytest.mark.parametrize(
    "make_uncommon",
    [
        lambda operators: setattr(operators, "modes", 1),
        lambda operators: setattr(operators, "functions", True),
        lambda operators: setattr(operators, "transformed", True),
        lambda operators: setattr(operators.core.counters, "is_slow", True),
        lambda operators: operators.core.counters.detach(),
        lambda operators: operators.core.configure(tensor_types=()),
    ],
)
def test_uncommon_calls_are_pythons(operators: Operators, make_uncommon: Callable[[Operators], None]) -> None:
    before = references(operators.core)
    make_uncommon(operators)
    operators.all_reduce(itself)(tensor(8, "cpu"), "sum", "0")

    assert operators.uncommon == ["launch"]
    assert operators.core.counters.launched == 0
    assert references(operators.core) == before


def test_other_forms_of_a_call_are_pythons(operators: Operators) -> None:
    all_reduce = operators.all_reduce(itself)
    all_reduce(tensor(8, "cpu"), "sum", group="0")
    all_reduce(tensor(8, "cpu"), "sum")
    all_reduce(tensor(8, "cpu"), "sum", "no such group")
    all_reduce(object(), "sum", "0")
    operators.core.core.Operator(itself, operators.capturing("several"))([tensor(8, "cpu")], "sum", "0")
    assert operators.uncommon == ["launch"] * 4 + ["several"]
    assert operators.core.counters.launched == 0


def test_once_nothing_captures_calls_are_passed_on(operators: Operators) -> None:
    all_reduce = operators.all_reduce(itself)
    all_reduce.capture = None
    assert all_reduce(tensor(8, "cpu"), "sum", "0").nbytes == 8
    assert (operators.uncommon, operators.core.counters.launched) == ([], 0)


def test_a_recording_may_end_before_a_call_is_pythons(operators: Operators) -> None:
    all_reduce = operators.all_reduce(itself)

    def end() -> int:
        all_reduce.capture = None
        return 1

    operators.core.core.configure_operators(
        failed=operators.core.errors.append, resolve_group=str, has_function=lambda _tensor: False, num_modes=end,
        is_transformed=lambda _tensor: False, pending={}, forget_result=str,
    )  # fmt: skip
    assert all_reduce(tensor(8, "cpu"), "sum", "0").nbytes == 8
    assert operators.uncommon == []


def test_an_operator_looks_like_its_original(operators: Operators) -> None:
    def original(*_arguments: object) -> None:
        """What it does."""

    call: Any = functools.update_wrapper(operators.all_reduce(original), original)
    assert (hash(call), call.__name__, call.__doc__, call.original) == (
        hash(original),
        "original",
        "What it does.",
        original,
    )
    call.itself = call
    del call
    gc.collect()


def test_a_refused_call_takes_no_number(operators: Operators) -> None:
    def refuse(*_arguments: object) -> None:
        raise ValueError("no such reduction")

    before = references(operators.core)
    for recording in (True, False):
        operators.core.core.set_recording(recording)
        with pytest.raises(ValueError, match="no such reduction"):
            operators.all_reduce(refuse)(tensor(8, "cpu"), "sum", "0")
    assert operators.core.counters.launched == 0
    assert references(operators.core) == before
    assert not operators.core.core.is_inside()
    assert not operators.core.core.is_in_operator()


def test_a_wait_that_raises_leaves_the_communication_to_be_waited_for(operators: Operators) -> None:
    def fail(_tensor: object) -> None:
        raise RuntimeError("timeout")

    result = operators.all_reduce(itself)(tensor(8, "cpu"), "sum", "0")
    with pytest.raises(RuntimeError, match="timeout"):
        operators.wait(fail)(result)
    assert operators.core.core.blocked() is None
    operators.wait(itself)(result)
    assert len(operators.core.take(COLLECTIVE)) == 1


def test_code_below_a_counted_call_knows_that_it_was_counted(operators: Operators) -> None:
    seen: list[tuple[bool, bool, object]] = []

    def look(tensor: Any, *_arguments: object) -> Any:
        core = operators.core.core
        seen.append((core.is_inside(), core.is_in_operator(), core.blocked() is not None))
        return tensor

    operators.wait(look)(operators.all_reduce(look)(tensor(8, "cpu"), "sum", "0"))
    assert seen == [(True, True, False), (False, False, True)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_of_ours_are_told_and_those_that_end_the_program_go_through(
    operators: Operators, error: type[BaseException]
) -> None:
    class Broken(SimulatedTensor):
        def untyped_storage(self) -> Any:
            raise error

    operators.core.configure(tensor_types=(Broken,))
    given = Broken(8, "cpu")
    if error is ValueError:
        assert operators.all_reduce(itself)(given, "sum", "0") is given
        assert [type(told) for told in operators.core.errors] == [ValueError]
        operators.core.errors.clear()
    else:
        with pytest.raises(KeyboardInterrupt):
            operators.all_reduce(itself)(given, "sum", "0")
    operators.core.core.end()
    [row] = operators.core.take(COLLECTIVE)
    assert row["is_unfinished"]


def test_a_recording_may_end_within_a_call(operators: Operators) -> None:
    core = operators.core

    def restart(tensor: Any, *_arguments: object) -> Any:
        core.core.end()
        core.core.reset(10)
        core.configure(tensor_types=(SimulatedTensor,))
        return tensor

    before = references(core)
    operators.wait(itself)(operators.all_reduce(restart)(tensor(8, "cpu"), "sum", "0"))
    operators.wait(restart)(operators.all_reduce(itself)(tensor(8, "cpu"), "sum", "0"))
    assert core.take() == []
    assert references(core) == before


def test_a_result_that_nobody_saw_is_not_waited_for_as_one_that_had_its_storage(operators: Operators) -> None:
    all_reduce, wait, result = operators.all_reduce(itself), operators.wait(itself), tensor(8, "cpu")
    all_reduce(result, "sum", "0")
    operators.core.core.set_recording(False)
    all_reduce(result, "sum", "0")  # another one, as far as its storage tells
    operators.pending[1] = "something of Python's"
    all_reduce(result, "sum", "0")
    operators.core.core.set_recording(True)
    operators.pending.clear()
    wait(result)

    [row] = operators.core.take()
    assert row["is_unfinished"]
    assert operators.forgotten == [id(result)]


def test_waits_of_python_are_left_to_python(operators: Operators) -> None:
    operators.pending[1] = "something of Python's"
    operators.wait(itself)(tensor(8, "cpu"))
    assert operators.uncommon == ["wait"]


def test_python_takes_over_what_it_sees_waited_for(operators: Operators) -> None:
    core, result = operators.core.core, tensor(8, "cpu")
    operators.all_reduce(itself)(result, "sum", "0")
    assert core.has_result(id(result))
    assert core.surrender_result(id(result))[4] == 8
    assert not core.has_result(id(result))
    assert core.surrender_result(id(result)) is None

    operators.all_reduce(itself)(result, "sum", "0")
    assert [facts[4] for facts in core.pending()] == [8]
    core.forget_result(id(result))
    [row] = operators.core.take()
    assert row["is_unfinished"]


def test_one_of_several_threads_that_wait_for_a_result_records_it(operators: Operators) -> None:
    waiting, result = threading.Barrier(4), operators.all_reduce(itself)(tensor(8, "cpu"), "sum", "0")
    wait = operators.wait(lambda _tensor: waiting.wait(10))
    threads = [threading.Thread(target=wait, args=(result,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(operators.core.take()) == 2


def test_results_beyond_what_can_be_remembered_are_counted(operators: Operators) -> None:
    kept = [operators.all_reduce(itself)(tensor(8, "cpu"), "sum", "0") for _ in range(5_000)]
    core = operators.core
    assert len(core.core.pending()) + core.num_dropped(COLLECTIVE) == len(kept)
    core.core.end_operators()
    assert core.core.pending() == []
    assert len(core.take(COLLECTIVE)) + core.num_dropped(COLLECTIVE) == len(kept)


# hooks


class Work:
    """Is over once it is told so."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over


class Hooks:
    """The hooks of a group, in a backward pass whose reducer sends."""

    def __init__(self, core: BareCore) -> None:
        self.core = core
        self.slow: list[tuple[str, int]] = []
        self.begun: list[int] = []
        self.task = 1
        self.node: object = None
        self.num_operations = 0
        self.configure()

    def configure(self, **changed: Any) -> None:
        usual: dict[str, Any] = {
            "failed": self.core.errors.append, "graph_task": lambda: self.task, "current_node": lambda: self.node,
            "begin_backward": self.begun.append, "all_reduce": ALL_REDUCE, "operation": 0, "name": 0,
        }  # fmt: skip
        self.core.core.configure_hooks(**{**usual, **changed})
        self.core.core.watch_reducer(True, False)
        self.pre = self.core.core.GroupHook(self.core.counters, self.slow_hook("pre"), is_post=False)
        self.post = self.core.core.GroupHook(self.core.counters, self.slow_hook("post"), is_post=True)

    def slow_hook(self, name: str) -> Callable[[Any], None]:
        return lambda arguments: self.slow.append((name, arguments.op_id))

    def begin(self, num_bytes: int = 8, name: int = ALL_REDUCE, tensors: list[Any] | None = None) -> int:
        self.num_operations += 1
        tensors = [tensor(num_bytes, "cpu")] if tensors is None else tensors
        self.pre(SimpleNamespace(op_id=self.num_operations, name=name, input_tensors=tensors))
        return self.num_operations

    def end(self, op_id: int, work: object = None) -> None:
        self.post(SimpleNamespace(op_id=op_id, work=work))

    def send(self, num_bytes: int = 8) -> Work:
        work = Work()
        self.end(self.begin(num_bytes), work)
        return work


@pytest.fixture
def hooks(core: BareCore) -> Hooks:
    return Hooks(core)


def ends(hooks: Hooks) -> list[tuple[int, bool, bool]]:
    """Bytes of the rows so far, and whether they ended, and exactly so."""
    rows = hooks.core.take(COLLECTIVE)
    return [(row["bytes"], not row["is_unfinished"], bool(row["end_exact"])) for row in rows]


def test_buckets_are_asked_in_order_whether_they_are_over(hooks: Hooks) -> None:
    before = references(hooks.core)
    first, second = hooks.send(8), hooks.send(16)
    second.is_over = True
    hooks.send(24)
    assert ends(hooks) == []  # what runs behind the first one is not asked
    first.is_over = True
    last = hooks.send(32)

    assert ends(hooks) == [(8, True, False), (16, True, False)]
    assert [facts[4] for facts in hooks.core.core.pending()] == [24, 32]
    assert (hooks.slow, hooks.begun, hooks.core.counters.launched) == ([], [1], 4)
    references_to_works = [sys.getrefcount(first), sys.getrefcount(second), sys.getrefcount(last)]
    assert references_to_works == [2, 2, 3]
    facts, end = hooks.core.core.latest_bucket(1)
    assert (facts[3:5], end) == ((3, 32), 0)
    assert hooks.core.core.latest_bucket(2) is None

    assert hooks.core.core.take_bucket(facts[0] - 1) is None
    assert hooks.core.core.take_bucket(facts[0]) is last
    hooks.core.core.forget_buckets()
    assert ends(hooks) == [(24, False, True)]
    assert hooks.core.core.take_bucket(facts[0]) is None
    assert references(hooks.core) == before


def test_the_last_bucket_may_be_over_before_the_wait_for_it(hooks: Hooks) -> None:
    hooks.send().is_over = True
    before = hooks.core.core.host_ns()
    hooks.core.core.ask_buckets()
    _, end = hooks.core.core.latest_bucket(1)
    assert before <= end <= hooks.core.core.host_ns()
    hooks.task = 2
    hooks.send()
    assert hooks.begun == [1, 2]


def test_calls_that_are_no_bucket_are_left_to_python(hooks: Hooks) -> None:
    core = hooks.core

    def begin_with(owner: object, name: str, value: object) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        hooks.begin()
        setattr(owner, name, before)

    uncommon: list[Callable[[], object]] = [
        lambda: hooks.begin(name=5),
        lambda: hooks.begin(tensors=[]),
        lambda: hooks.begin(tensors=[tensor(8, "cpu"), tensor(8, "cpu")]),
        lambda: hooks.begin(tensors=[object()]),
        lambda: begin_with(hooks, "node", object()),
        lambda: begin_with(hooks, "task", -1),
        lambda: (core.core.set_waits_in_cpp(True), hooks.begin(), core.core.set_waits_in_cpp(False)),
        lambda: begin_with(core.counters, "is_slow", True),
        lambda: (core.core.watch_reducer(False, False), hooks.begin(), core.core.watch_reducer(True, False)),
    ]
    for number, call in enumerate(uncommon, 1):
        call()
        hooks.end(number)
        assert hooks.slow[-2:] == [("pre", number), ("post", number)]
    assert core.counters.launched == 0


def test_counted_calls_pass_by(hooks: Hooks) -> None:
    core = hooks.core.core
    core.set_inside(True)
    hooks.end(hooks.begin())
    assert hooks.slow == []
    core.watch_reducer(True, True)  # it may wait for the future of what Python sends in a backward
    hooks.end(hooks.begin())
    hooks.task = -1
    hooks.end(hooks.begin())
    core.set_inside(False)
    assert hooks.slow == [("pre", 2)]


def test_a_gradients_node_is_the_reducers(hooks: Hooks) -> None:
    hooks.node = type("AccumulateGrad", (), {})()
    hooks.send()
    hooks.send()
    assert (hooks.slow, hooks.core.counters.launched) == ([], 2)


def test_refused_and_skipped_calls_are_not_recorded(hooks: Hooks) -> None:
    hooks.begin()  # and no post-hook
    hooks.core.counters.is_skipped = True
    hooks.send()
    hooks.core.counters.is_skipped = False
    hooks.core.core.set_recording(False)
    hooks.send()
    hooks.core.core.set_recording(True)
    hooks.send(16)
    hooks.core.core.forget_buckets()

    assert [(row["seq"], row["bytes"]) for row in hooks.core.take(COLLECTIVE)] == [(2, 16)]


def test_operations_within_one_another_each_have_their_hooks(hooks: Hooks) -> None:
    refused = [hooks.begin(8) for _ in range(20)]
    outer = hooks.begin(16)
    inner = hooks.begin(24)
    hooks.begin(32)  # refused
    hooks.end(inner, Work())
    hooks.end(outer, Work())
    hooks.core.core.forget_buckets()
    assert [(row["seq"], row["bytes"]) for row in hooks.core.take(COLLECTIVE)] == [(0, 24), (1, 16)]

    assert hooks.core.core.is_in_hook()
    for op_id in refused:
        hooks.end(op_id, Work())
    assert not hooks.core.core.is_in_hook()


def test_a_stop_within_a_hook_is_told_and_nothing_follows(hooks: Hooks) -> None:
    seen: list[bool] = []

    def stop(_task: int) -> None:
        seen.append(hooks.core.core.is_in_hook())
        hooks.core.core.end_hooks()
        hooks.core.core.forget_buckets()

    assert not hooks.core.core.is_in_hook()
    hooks.configure(begin_backward=stop)
    hooks.send()
    assert seen == [True]
    launched = hooks.core.counters.launched
    hooks.end(hooks.begin(), Work())
    assert (hooks.slow, hooks.core.counters.launched) == ([], launched)
    assert not hooks.core.core.is_in_hook()


def test_a_hook_of_another_recording_does_nothing(hooks: Hooks) -> None:
    earlier, begun = (hooks.pre, hooks.post), hooks.begin()
    hooks.configure()
    hooks.end(begun, Work())  # of an operation that the earlier one has seen begin: Python's does not know it
    assert hooks.slow == [("post", begun)]
    hooks.pre, hooks.post = earlier
    hooks.send()
    assert (hooks.slow[1:], hooks.core.counters.launched, hooks.core.core.pending()) == ([], 0, [])


def test_another_groups_operation_may_have_the_number_of_one_that_was_refused(hooks: Hooks) -> None:
    hooks.begin()  # refused
    other = ProcessGroup()
    hooks.core.counters = hooks.core.group(other)
    hooks.configure()
    hooks.num_operations = 0
    hooks.end(hooks.begin(tensors=[]), Work())  # which is Python's
    assert hooks.slow == [("pre", 1), ("post", 1)]
    hooks.num_operations = 0
    hooks.send()
    assert (len(hooks.slow), hooks.core.counters.launched) == (2, 1)


def test_a_work_that_cannot_be_asked_is_reported(hooks: Hooks) -> None:
    class Broken(Work):
        def is_completed(self) -> bool:
            raise RuntimeError("aborted")

    hooks.end(hooks.begin(), Broken())
    hooks.send()
    assert [str(error) for error in hooks.core.errors] == ["aborted"]
    hooks.core.errors.clear()
    hooks.core.core.end()
    assert len(hooks.core.take(COLLECTIVE)) == 2


def test_errors_of_pythons_part_do_not_reach_training_and_those_that_end_the_program_do(hooks: Hooks) -> None:
    def fail(_task: int) -> None:
        raise errors.pop()

    errors: list[BaseException] = [KeyboardInterrupt(), ValueError("no engine")]
    hooks.configure(begin_backward=fail)
    hooks.send()
    assert [str(error) for error in hooks.core.errors] == ["no engine"]
    hooks.core.errors.clear()
    hooks.task = 2
    with pytest.raises(KeyboardInterrupt):
        hooks.send()
    assert not hooks.core.core.is_in_hook()


def test_buckets_that_never_end_are_given_up(hooks: Hooks) -> None:
    works = [hooks.send() for _ in range(1_010)]
    assert ends(hooks) == [(8, False, True)] * 10
    of_first, of_last = (sys.getrefcount(work) for work in (works[0], works[-1]))
    assert of_last == of_first + 1
    hooks.core.core.end()
    assert len(ends(hooks)) == 1_000


def test_each_thread_has_its_own_operations(hooks: Hooks) -> None:
    barrier = threading.Barrier(4)

    def send(op_id: int) -> None:
        for _ in range(50):
            hooks.pre(SimpleNamespace(op_id=op_id, name=ALL_REDUCE, input_tensors=[tensor(8, "cpu")]))
            barrier.wait(10)
            hooks.post(SimpleNamespace(op_id=op_id, work=Work()))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hooks.core.core.forget_buckets()
    assert sorted(row["seq"] for row in hooks.core.take(COLLECTIVE)) == list(range(200))


def test_a_forked_child_begins_with_nothing_and_can_record(hooks: Hooks, operators: Operators) -> None:
    kept = [hooks.send() for _ in range(3)]
    operators.all_reduce(itself)(tensor(8, "cpu"), "sum", "0")
    open_operation = hooks.begin()

    def records() -> bool:
        core = hooks.core
        core.core.reset(100)
        core.configure(tensor_types=(SimulatedTensor,))
        core.core.set_recording(True)
        core.process_group = ProcessGroup()
        core.counters = core.group(core.process_group)
        inherited = core.take()
        hooks.configure()
        hooks.end(open_operation, Work())
        hooks.send(16)
        core.core.forget_buckets()
        return inherited == [] and [(row["seq"], row["bytes"]) for row in core.take(COLLECTIVE)] == [(0, 16)]

    assert in_child(records)
    assert len(kept) == 3
