"""Number steps as Hugging Face's Trainer and Lightning do, also after a resume; the step finder finds the steps."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from commtrace.capture.hooks import Hooks, installed
from commtrace.capture.tracer import Tracer

PART: Final = "step numbers of trainers"

_LIGHTNING: Final = ("lightning.pytorch.trainer.call", "pytorch_lightning.trainer.call")


def install(tracer: Tracer) -> Callable[[], None]:
    """Hook both now or when they are imported; return the function that undoes it."""
    return installed(TrainerNumbers(tracer))


class TrainerNumbers:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)

    def install(self) -> None:
        wrap = self._hooks.around(self._transformers, _nothing)
        module, owner = "transformers.trainer_callback", "CallbackHandler"
        self._hooks.replace_method_when_imported(module, owner, "on_train_begin", wrap)
        for module in _LIGHTNING:
            self._hooks.when_imported(module, self._hook_lightning)

    def uninstall(self) -> None:
        self._hooks.restore()

    def _hook_lightning(self, module: ModuleType) -> None:
        self._hooks.replace(module, "_call_callback_hooks", self._hooks.around(self._lightning, _nothing))

    def _transformers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = kwargs["state"] if "state" in kwargs else args[2]
        # transformers logs a step under the number of updates made by its end, Lightning under that before it.
        self._begins_with(int(state.global_step) + 1, "the Trainer's global_step")

    def _lightning(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook = kwargs["hook_name"] if "hook_name" in kwargs else args[1]
        if hook == "on_train_start":
            trainer = kwargs["trainer"] if "trainer" in kwargs else args[0]
            self._begins_with(int(trainer.global_step), "Lightning's global_step")

    def _begins_with(self, number: int, whose: str) -> None:
        if self._tracer.steps.begins_with(number):
            self._tracer.set_topology({"step_numbers": whose})


def _nothing(_begun: object, _result: object) -> None:
    """Do nothing when training begins."""
