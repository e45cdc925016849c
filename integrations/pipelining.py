"""Integrate torch.distributed.pipelining: every action of a schedule is a span with microbatch, chunk and stage.

``stage`` is the rank's place in the pipeline's group, ``chunk`` that of torch's stage among the rank's; torch's own
numbers of stages are in ``stage_indices`` of the topology, by chunk.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Final, Protocol

from torch.distributed import ProcessGroup

from commtrace.capture.hooks import Arguments, Hooks, Keywords, installed
from commtrace.capture.records import Span
from commtrace.capture.tracer import Tracer
from commtrace.integrations.topology import add_dimension, add_framework, set_role_if_unknown
from commtrace.trace import schema
from commtrace.trace.schedule import known_name

PART: Final = "pipelining"


def install(tracer: Tracer) -> Callable[[], None]:
    """Instrument torch.distributed.pipelining, now or when it is imported; return the function that undoes it."""
    return installed(PipeliningIntegration(tracer))


class Stage(Protocol):
    """The part of a ``_PipelineStageBase`` that is read; ``group`` is None for the default group."""

    group: ProcessGroup | None
    group_rank: int
    group_size: int
    stage_index: int


class Schedule(Protocol):
    """The part of a ``_PipelineSchedule`` that is read; of several stages per rank, ``_stages`` holds them."""

    _n_microbatches: int
    _stage: Stage


class PipeliningIntegration:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._hooks = Hooks(PART, tracer)
        self._chunks: weakref.WeakKeyDictionary[Stage, int] = weakref.WeakKeyDictionary()
        self._announced: weakref.WeakSet[Schedule] = weakref.WeakSet()
        self._evaluations = 0

    def install(self) -> None:
        self._hooks.when_imported("torch.distributed.pipelining.stage", self._hook_stages)
        self._hooks.when_imported("torch.distributed.pipelining.schedules", self._hook_schedules)

    def uninstall(self) -> None:
        self._hooks.restore()

    # Schedules

    def _hook_schedules(self, module: ModuleType) -> None:
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            self._hooks.replace_required(getattr(module, name), "step", self._wrap_step)
        base = getattr(module, "_PipelineSchedule", None)
        if base is not None:
            self._hooks.replace(base, "eval", self._wrap_eval)

    def _wrap_step(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(args: Arguments, _kwargs: Keywords) -> None:
            if not self._evaluations:
                self._begin_iteration(args[0])

        return self._hooks.around(begin)(original)

    def _begin_iteration(self, schedule: Schedule) -> None:
        if schedule not in self._announced:
            self._announced.add(schedule)
            self._announce(schedule)
        if getattr(schedule, "_has_backward", True):
            self._tracer.steps.iteration_begins()

    def _announce(self, schedule: Schedule) -> None:
        # A schedule of one stage per rank holds it as _stage, the others hold theirs in a list.
        stages: list[Stage] = getattr(schedule, "_stages", None) or [schedule._stage]
        for chunk, stage in enumerate(stages):
            self._chunks[stage] = chunk
        first = stages[0]
        group = first.group if first.group is not None else _default_group()
        set_role_if_unknown(self._tracer, group, "pp")
        add_dimension(self._tracer, "pp", first.group_rank, first.group_size)
        add_framework(self._tracer, "torch.distributed.pipelining")
        self._tracer.set_topology(
            {
                "schedule": schedule_name(type(schedule).__name__),
                "stages": first.group_size,
                "chunks": len(stages),
                "microbatches": int(schedule._n_microbatches),
                "stage_indices": [stage.stage_index for stage in stages],
            }
        )

    def _wrap_eval(self, original: Callable[..., object]) -> Callable[..., object]:
        def begin(_args: Arguments, _kwargs: Keywords) -> tuple[Span, bool]:
            has_left = self._tracer.steps.evaluation_begins()
            span = self._tracer.enter(schema.EVALUATION, "evaluation")
            self._evaluations += 1
            return span, has_left

        def end(begun: tuple[Span, bool], _result: object) -> None:
            span, has_left = begun
            self._evaluations -= 1
            self._tracer.leave(span)
            self._tracer.steps.evaluation_ended(has_left=has_left)

        return self._hooks.around(begin, end)(original)

    # Actions

    def _hook_stages(self, module: ModuleType) -> None:
        base = getattr(module, "_PipelineStageBase", None)
        if base is not None:
            self._hooks.replace(base, "forward_one_chunk", self._wrap_forward)
            self._hooks.replace(base, "backward_one_chunk", self._wrap_backward)
            self._hooks.replace(base, "backward_weight_one_chunk", self._wrap_backward_weight)
            self._hooks.replace(base, "perform_reduce_grad", self._hooks.timed(schema.PHASE, "reduce"))

    def _wrap_forward(self, original: Callable[..., object]) -> Callable[..., object]:
        return self._action(original, schema.FORWARD, lambda _: "forward")

    def _wrap_backward(self, original: Callable[..., object]) -> Callable[..., object]:
        def name(arguments: Keywords) -> str:
            return "backward" if arguments.get("full_backward", True) else "backward_input"

        return self._action(original, schema.BACKWARD, name)

    def _wrap_backward_weight(self, original: Callable[..., object]) -> Callable[..., object]:
        return self._action(original, schema.BACKWARD, lambda _: "backward_weight")

    def _action(
        self, original: Callable[..., object], kind: int, name: Callable[[Keywords], str]
    ) -> Callable[..., object]:
        def begin(args: Arguments, kwargs: Keywords) -> Span | None:
            stage, microbatch = args[:2]  # every version passes these first and the rest by name
            trains = kind == schema.FORWARD or getattr(stage, "has_backward", True)
            if self._evaluations or not trains:
                return None
            return self._tracer.enter(kind, name(kwargs), microbatch, self._chunks.get(stage, 0), stage.group_rank)

        return self._hooks.around(begin, self._hooks.end)(original)


def schedule_name(class_name: str) -> str:
    """Return ``1f1b`` for ``Schedule1F1B``; for an unknown class, the parts of its name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", class_name.removeprefix("_").removeprefix("Schedule"))
    return known_name(class_name) or words.lower()


def _default_group() -> ProcessGroup:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_group()
