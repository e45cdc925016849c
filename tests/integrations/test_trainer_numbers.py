"""The numbers of steps in loops of trainers, with stand-ins for the places where theirs begin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commtrace.integrations.loop import install_numbers
from commtrace.trace import schema
from tests.capture.recording import Recording


class CallbackHandler:
    def on_train_begin(self, args: object, state: SimpleNamespace, control: object) -> str:
        return "begun"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    transformers: Any
    lightning: Any
    transformers, lightning = ModuleType("transformers.trainer_callback"), ModuleType("lightning.pytorch.trainer.call")
    handler: Any = type("CallbackHandler", (CallbackHandler,), {"on_train_begin": CallbackHandler.on_train_begin})
    transformers.CallbackHandler = handler
    lightning._call_callback_hooks = lambda trainer, hook_name: hook_name
    for module in (transformers, lightning):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    recording = Recording()
    uninstall = install_numbers(recording.tracer)
    yield recording
    uninstall()
    assert "_surrounded" not in repr(handler.on_train_begin)


def numbers(recording: Recording) -> list[int]:
    steps = recording.tracer.steps
    for _ in range(3):
        steps.work_begins()
        steps.optimizer_ended(recording)
    recording.tracer.finish()
    return [int(row.step) for row in recording.rows(schema.STEP)]


def test_a_resumed_trainer_of_transformers_goes_on_with_its_next_update(loop: Recording) -> None:
    handler = sys.modules["transformers.trainer_callback"].CallbackHandler()

    assert handler.on_train_begin(None, SimpleNamespace(global_step=20), None) == "begun"
    assert numbers(loop) == [21, 22, 23]
    assert loop.tracer.topology()[1]["step_numbers"] == "the Trainer's global_step"


def test_lightning_counts_from_the_updates_that_were_made(loop: Recording) -> None:
    call = sys.modules["lightning.pytorch.trainer.call"]._call_callback_hooks

    assert call(SimpleNamespace(global_step=9), "setup") == "setup"
    assert call(SimpleNamespace(global_step=10), "on_train_start") == "on_train_start"
    assert numbers(loop) == [10, 11, 12]


def test_steps_that_the_script_marks_keep_their_numbers(loop: Recording) -> None:
    loop.tracer.begin_step(5, is_users=True)
    sys.modules["lightning.pytorch.trainer.call"]._call_callback_hooks(SimpleNamespace(global_step=0), "on_train_start")

    assert loop.tracer.topology()[1]["step_numbers"] == "the script's numbers"
