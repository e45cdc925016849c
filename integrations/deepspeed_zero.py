"""Captures the phases of ZeRO 1 to 3: ``gather`` and ``prefetch`` of parameters, ``reduce`` of gradients.

ZeRO 3 prefetches what later modules will need, once it has seen all modules of a micro-step in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commtrace.capture.hooks import Hooks
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.trace import schema

_ZERO: Final = "deepspeed.runtime.zero"
_COORDINATOR: Final = (f"{_ZERO}.partitioned_param_coordinator", "PartitionedParameterCoordinator")

_REDUCE: Final = (
    (
        f"{_ZERO}.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
    ),
    (f"{_ZERO}.stage_1_and_2", "DeepSpeedZeroOptimizer", "reduce_ipg_grads"),
)
"""Module, class and method; a version without such a method has no such phase."""


class ZeroPhases:
    """The hooks in ZeRO's optimizers and in the coordinator of its parameters."""

    def __init__(self, tracer: Tracer, hooks: Hooks) -> None:
        self._tracer = tracer
        self._hooks = hooks
        self._fetched_for: Any = None

    def install(self) -> None:
        """Register the hooks."""
        replace = self._hooks.replace_method_when_imported
        replace(*_COORDINATOR, "fetch_sub_module", self._fetching)
        replace(*_COORDINATOR, "_PartitionedParameterCoordinator__all_gather_params", self._gathering)
        for module, owner, method in _REDUCE:
            replace(module, owner, method, self._hooks.timed(schema.PHASE, "reduce"))

    def _fetching(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap the fetching of a module: first of its own parameters, then of those of modules to come."""

        def begin(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any]:
            outer = self._fetched_for
            self._fetched_for = args[1] if len(args) > 1 else kwargs.get("current_submodule")
            return (outer,)

        def end(begun: tuple[Any], _result: object) -> None:
            (self._fetched_for,) = begun

        return self._hooks.around(begin, end)(original)

    def _gathering(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: tuple[Any, ...], _kwargs: dict[str, object]) -> Span:
            module, parameters = self._fetched_for, args[1] if len(args) > 1 else ()
            one = next(iter(parameters), None)
            is_prefetch = not (module is None or one is None or _is_parameter_of(module, one))
            return self._tracer.enter(schema.PHASE, "prefetch" if is_prefetch else "gather")

        return self._hooks.around(begin, self._hooks.end)(original)


def _is_parameter_of(module: Any, parameter: object) -> bool:
    """Return whether this module, without the ones in it, needs the parameter."""
    own = module.parameters(recurse=bool(getattr(module, "_z3_leaf", False)))
    external = getattr(module, "_external_params", {}).values()  # of other modules, which it uses all the same
    return any(one is parameter for one in (*own, *external))
