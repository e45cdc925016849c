"""A script may start and stop the recording wherever its code runs, also in the middle of what we hook.

Each job calls a function of the test's in one such place, again and again, which starts or stops the recording. The job
computes what it computes without commtrace; nothing is logged as failed; in the end everything is as it was.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizer_hooks
from torch.utils.data import DataLoader, Dataset

import commtrace
from commtrace.recording import session
from tests.safety import faults, jobs
from tests.safety.faults import Place
from tests.safety.jobs import digest, seed
from tests.safety.models import Net, alive, batch, local
from tests.safety.recorded import (  # fmt: skip
    ALONE,
    FILTERS,
    PARTS,
    earlier_jobs,
    is_of_a_hook,
    is_of_part,
    new_ways,
    put_back,
    replaced_now,
)

pytestmark = FILTERS

Act = Callable[..., None]
STEPS: Final = 3
MOST_SWITCHES: Final = 7


class Batches(Dataset[torch.Tensor]):
    """Calls when a batch is asked for, as the data sets of scripts do."""

    def __init__(self, act: Act) -> None:
        self._act = act

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> torch.Tensor:
        self._act()
        return (batch() + number).requires_grad_()


class Training:
    """A model that communicates, with what a script can hang into it."""

    def __init__(self) -> None:
        seed()
        self.net = Net()
        self.model: Any = DistributedDataParallel(self.net)
        alive.clear()
        alive.update([self.model, *self.net.modules()])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.data: Any = DataLoader(Batches(lambda: None), batch_size=None)
        self.during: Callable[[int], AbstractContextManager[Any]] = lambda _: ExitStack()

    def run(self) -> str:
        losses = []
        for number, values in enumerate(self.data):
            with self.during(number):
                loss = self.model(values).square().mean()
                loss.backward()
                work: Any = dist.all_reduce(loss.detach(), async_op=True)
                work.wait()
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss)
        return digest(*losses, *map(local, self.net.parameters()))


@contextmanager
def registered(*handles: Any) -> Iterator[None]:
    """With hooks in place, and others behind them: what goes through a table has something left to go through."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def nothing(*_arguments: object) -> None:
    return None


def by_hook(register: Callable[[Training], Callable[[Any], Any]]) -> Callable[[Training, Act], Any]:
    def place(training: Training, act: Act) -> Any:
        add = register(training)
        return registered(add(lambda *_arguments: act()), add(nothing))

    return place


def in_a_hook_of_ddp(training: Training, act: Act) -> Any:
    def reduce(_state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which here are texts
        act()
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        act()
        return work.get_future().then(lambda future: future.value()[0])

    training.model.register_comm_hook(None, reduce)
    return ExitStack()


def in_the_data(training: Training, act: Act) -> Any:
    training.data = DataLoader(Batches(act), batch_size=None)
    return ExitStack()


def in_a_signal(training: Training, act: Act) -> Any:
    """Its handler runs in the middle of the forward, of the backward and of the step."""
    earlier = signal.signal(signal.SIGUSR1, lambda *_: act())
    places = ExitStack()
    places.callback(signal.signal, signal.SIGUSR1, earlier)
    raises = partial(signal.raise_signal, signal.SIGUSR1)
    for add in (
        training.net.blocks[0].register_forward_hook,
        next(training.net.parameters()).register_hook,
        training.optimizer.register_step_post_hook,
    ):
        places.enter_context(registered(add(lambda *_: raises())))
    return places


def in_a_span(training: Training, act: Act) -> Any:
    @contextmanager
    def during(number: int) -> Iterator[None]:
        with commtrace.span("outer"), commtrace.span("inner"):
            act()
            yield
        act()

    training.during = during
    return ExitStack()


def in_a_step(training: Training, act: Act) -> Any:
    @contextmanager
    def during(number: int) -> Iterator[None]:
        with commtrace.step(number):
            act()
            yield
            act()

    training.during = during
    return ExitStack()


def in_a_thread(training: Training, act: Act) -> Any:
    def aside(*_arguments: object) -> None:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    return registered(training.net.blocks[1].register_forward_hook(aside))


def while_a_model_is_sharded(training: Training, act: Act) -> Any:
    training.net = Net()
    alive.clear()
    alive.update(training.net.modules())
    for block in training.net.blocks:
        fully_shard(block)
    fully_shard(training.net)
    training.model = training.net
    training.optimizer = torch.optim.SGD(training.net.parameters(), lr=0.1)
    add = training.net.blocks
    return registered(
        add[0].register_forward_pre_hook(lambda *_: act()), add[1].register_forward_hook(lambda *_: act())
    )


PLACES: Final[dict[str, Callable[[Training, Act], Any]]] = {
    "all optimizers, before": by_hook(lambda _: optimizer_hooks.register_optimizer_step_pre_hook),
    "all optimizers, after": by_hook(lambda _: optimizer_hooks.register_optimizer_step_post_hook),
    "optimizer, before": by_hook(lambda training: training.optimizer.register_step_pre_hook),
    "optimizer, after": by_hook(lambda training: training.optimizer.register_step_post_hook),
    "all modules, before": by_hook(lambda _: module_hooks.register_module_forward_pre_hook),
    "all modules, after": by_hook(lambda _: module_hooks.register_module_forward_hook),
    "all modules, backward": by_hook(lambda _: module_hooks.register_module_full_backward_hook),
    "module, before": by_hook(lambda training: training.net.blocks[1].register_forward_pre_hook),
    "module, after": by_hook(lambda training: training.net.blocks[0].register_forward_hook),
    "module, before its backward": by_hook(lambda training: training.net.blocks[0].register_full_backward_pre_hook),
    "module, backward": by_hook(lambda training: training.net.blocks[1].register_full_backward_hook),
    "tensor": by_hook(lambda training: next(training.net.parameters()).register_hook),
    "gradient": by_hook(lambda training: next(training.net.parameters()).register_post_accumulate_grad_hook),
    "DDP": in_a_hook_of_ddp,
    "data": in_the_data,
    "signal": in_a_signal,
    "span": in_a_span,
    "step": in_a_step,
    "thread": in_a_thread,
    "FSDP": while_a_model_is_sharded,
}


def result(place: Callable[[Training, Act], Any], act: Act) -> str:
    training = Training()
    with place(training, act):
        return training.run()


@pytest.fixture
def config(tmp_path: Path) -> commtrace.Config:
    return commtrace.Config(dir=str(tmp_path), modules="depth=2")


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged of parts that fail."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: found.append(record.getMessage()))
    logger = logging.getLogger("commtrace")
    logger.addHandler(handler)
    with jobs.alone():
        yield found
    commtrace.stop()
    logger.removeHandler(handler)
    found[:] = [message for message in found if "already" not in message]
    assert found == []


@pytest.mark.parametrize("name", PLACES)
def test_starting_and_stopping(
    name: str, config: commtrace.Config, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES[name]
    # Looking for models among all objects of the tests takes most of the time.
    monkeypatch.setattr(gc, "get_objects", lambda: list(alive))
    expected = result(place, nothing)
    switched: list[str] = []

    def switch() -> None:
        if len(switched) == MOST_SWITCHES:
            return
        if session._current is None:
            commtrace.start(config)
            switched.append("on")
        else:
            commtrace.stop()
            switched.append("off")

    commtrace.start(config)  # also imports what is imported late
    commtrace.stop()
    before = replaced_now()
    for is_on in (False, True):
        switched.clear()
        if is_on:
            commtrace.start(config)
        assert result(place, switch) == expected
        commtrace.stop()
        assert replaced_now() == before
        assert {"on", "off"} == set(switched)


def stop_in_every_line(
    job: Callable[[], str], record: Callable[[], Any], part: int, others: Sequence[Callable[[], str]] = ()
) -> None:
    """A signal's handler stops the recording in any line of the hooks: it has stopped, and nothing else happens."""
    expected = job()
    places = [place for place in new_ways(job, record, others).values() if is_of_a_hook(place)]
    wrong: dict[Place, list[str]] = {}
    chosen = [place for place in places if is_of_part(place, part)]
    for place in chosen:
        before, problems = replaced_now(), []
        with record() as recording, faults.interrupted(place, commtrace.stop):
            if recording.run(job) != expected:
                problems.append("the result differs")
        problems += recording.messages
        after = replaced_now()
        if after != before:
            problems += [str(name) for name in {*before, *after} if before.get(name) != after.get(name)]
            put_back(before)
        if problems:
            wrong[place] = problems
    text = "\n".join(f"{place}: {'; '.join(problems)}" for place, problems in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(chosen)} lines:\n{text}"
    assert chosen


STOPPED_OF_FOUR = {name: jobs.OF_FOUR[name] for name in ("collectives", "functional_collectives", "meshes")}
STOPPED_ALONE = {name: ALONE[name] for name in ("data_parallel", "found_steps", "fully_sharded", "module_spans")}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", STOPPED_OF_FOUR)
def test_a_signal_stops_in_any_line(name: str, part: int, recorded: Any) -> None:
    with jobs.rank_1_of_4():
        stop_in_every_line(jobs.OF_FOUR[name], recorded, part, earlier_jobs(name, STOPPED_OF_FOUR))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", STOPPED_ALONE)
def test_a_signal_stops_in_any_line_of_a_model(
    name: str, part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.call_back_at_once(monkeypatch)
    with jobs.alone():
        stop_in_every_line(ALONE[name], recorded, part, earlier_jobs(name, STOPPED_ALONE))
