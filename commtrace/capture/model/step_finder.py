"""Find the steps of a training loop without marks: each ends when every optimizer of the loop has stepped.

* Where one optimizer steps in every cycle of work and update, and others in some of them, each cycle is a step: it ends
  with that optimizer. That is known when two of them have stepped in one cycle, and one of these in all cycles before.
* The first step begins with the first forward or backward; an optimizer that steps once before only fills its state.
* An evaluation before a step's first work lies between it and the step before, unless that had one too.
* A training ends where the process gives up its process groups, and another one begins where a new optimizer is made
  between two steps: what follows until the next work is set-up.
* Work that no optimizer has ended is not recorded. An integration or ``commtrace.step`` takes over for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import torch

from commtrace.capture.model.step_updates import StepUpdates

if TYPE_CHECKING:
    from commtrace.trace.topology import Topology

_PATIENCE: Final = 8
"""Optimizers that did not step are given up after so many steps per optimizer of the loop:
a critic that is trained five times as often as its generator is waited for."""


_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread is in; −1 outside of one."""


class StepMarker(Protocol):
    """The part of the tracer that a finder needs."""

    def begin_step(
        self, number: int | None = None, *, is_users: bool = False, is_found: bool = False, skipped: int = 0
    ) -> None: ...

    def restart_step(self, *, is_first: bool = False) -> None: ...

    def leave_step(self) -> None: ...

    def return_to_step(self) -> None: ...

    def discard_step(self, *, frees_number: bool = False) -> None: ...

    def end_step(self, *, is_last: bool = False) -> None: ...

    def set_topology(self, topology: Topology) -> None: ...


class StepFinder:
    """Begin the tracer's steps, as long as ``finding``: until an integration or the script begins one."""

    def __init__(self, tracer: StepMarker) -> None:
        self.finding = True
        self.is_marked_by_framework = False
        self.updates = 0
        self._tracer = tracer
        self._has_begun = False
        self._has_computed = self._worked = False
        self._stepped_alone: set[int] = set()
        self._first_number: int | None = None
        self._evaluated = self._evaluated_before = False
        self._has_left = False
        self._ends_with_backward = False
        self._references: dict[int, weakref.ref[object]] = {}
        self._missing: set[int] = set()
        self._of_step = self._most_of_a_step = 0
        self._updates = StepUpdates()
        self._former: dict[int, weakref.ref[object]] = {}
        self._is_set_up = self._was_set_up = False
        self._pace: int | None = None  # the optimizer that steps in all cycles, if that is not each of them
        self._cycle: dict[int, None] = {}  # the optimizers that have stepped since the latest work, in their order
        self._cycle_ended_step = self._has_joint_updates = False
        self._cycles = self._cycles_of_step = self._cycles_without_pace = 0
        self._cycles_with: dict[int, int] = {}

    def give_way(self, *, is_users: bool) -> None:
        """Find no steps from now on: an integration or the script marks them."""
        self.is_marked_by_framework = self.is_marked_by_framework or not is_users
        if self.finding:
            self.finding = False
            self._references.clear()
            self._former.clear()
            if self._has_begun:
                self._tracer.discard_step(frees_number=True)

    def training_ended(self) -> None:
        """Handle that the process has given up its process groups: what it trains later begins anew."""
        if self.finding and self._has_begun:
            self._tracer.discard_step(frees_number=True)
            self._tracer.end_step(is_last=True)
            self._set_aside_optimizers()
            self._has_begun = self._has_computed = self._worked = self._ends_with_backward = self._has_left = False
            self._evaluated = self._evaluated_before = self._is_set_up = self._was_set_up = False
            self._first_number = None
            self._stepped_alone.clear()

    def optimizer_begins(self, optimizer: object) -> None:
        if not self.finding:
            return
        if self._has_computed:
            self._work_begins()
        elif id(optimizer) not in self._stepped_alone:
            self._stepped_alone.add(id(optimizer))
            self._begin_first_step()
            self._has_left = True
            self._tracer.leave_step()
        else:
            self._has_computed = True
            self._return()
            self._cut()
            self._work_begins()

    def begins_with(self, number: int) -> bool:
        """Set the program's number of the first step; return False if it is too late or steps are marked."""
        if not self.finding or self._has_begun:
            return False
        self._first_number = number
        return True

    def work_begins(self) -> None:
        if not self.finding:
            return
        if self._cycle and _graph_task() == -1:
            self._cycle_ends()
        if not self._worked or self._has_left or self._ends_with_backward:
            self._work_begins()

    def _work_begins(self) -> None:
        if not self._has_computed:
            self._has_computed = True
            self._begin_first_step()
            if self._stepped_alone:
                self._tracer.restart_step()
        elif self._ends_with_backward and _graph_task() == -1:
            self._cut()  # the end of that backward was not seen
        if self._is_set_up and not self._worked:
            self._tracer.restart_step(is_first=True)
        if self._has_left:
            self._return()  # What was taken for an evaluation has not ended: it was none.
        self._worked = True

    def iteration_begins(self) -> None:
        """Handle that a pipeline is about to run all its microbatches: an iteration, if there are no optimizers."""
        if self.finding and self._worked and not self._references:
            self._cut()
        self.work_begins()

    def backward_ended(self) -> None:
        if self._ends_with_backward and self.finding:
            self._cut()

    def trains(self, model: torch.nn.Module) -> bool:
        """Return whether an optimizer steps parameters of this model only, so that it is all that is trained."""
        parameters = {id(parameter) for parameter in model.parameters()}
        for reference in tuple(self._references.values()):
            groups = getattr(reference(), "param_groups", None) or ()
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            if stepped and stepped <= parameters:
                return True
        return False

    def evaluation_begins(self) -> bool:
        """Handle the begin of an evaluation; return whether the current step has been left for it."""
        if self._has_left or not self._is_between_steps():
            return False
        self._has_left = True
        self._tracer.leave_step()
        return True

    def evaluation_ended(self, *, has_left: bool = False) -> None:
        """Handle the end of an evaluation; ``has_left`` is the result of :meth:`evaluation_begins`."""
        self._evaluated = True
        if self._is_between_steps():
            self._tracer.restart_step()
            if has_left:
                self._return()

    def optimizer_made(self, optimizer: object) -> None:
        if not self.finding or id(optimizer) in self._references:
            return
        if self._is_between_trainings():
            self._set_aside_optimizers()
            self._is_set_up = True
            if not self._has_left:
                self._has_left = True
                self._tracer.leave_step()
        number = id(optimizer)
        self._references[number] = weakref.ref(optimizer, lambda _: self._forget(number))
        self._missing.add(number)

    def optimizer_is_part_of_another(self, optimizer: object) -> None:
        """Wait no more for an optimizer that steps inside the step of another one."""
        if self.finding:
            self._forget(id(optimizer))

    def optimizer_ended(self, optimizer: object) -> None:
        """Handle that the outermost optimizer has stepped, or was skipped because its gradients overflowed."""
        self.updates += 1
        if not self.finding:
            return
        number = id(optimizer)
        if number in self._former:  # It goes on to train, and so do those that it trained with.
            self._references.update(self._former)
            self._missing.update(self._former)
            self._former.clear()
        is_new = number not in self._references
        if is_new:
            self.optimizer_made(optimizer)
        if not self._has_computed:
            return
        self._missing.discard(number)
        self._of_step += 1
        self._updates.add(optimizer)
        self._cycle[number] = None
        if self._pace is None and self._cycles_of_step:
            self._find_pace()
        if self._pace is not None:
            if self._pace in self._cycle and not self._cycle_ended_step:
                self._end_iteration()
            return
        if self._missing and self._of_step > max(_PATIENCE * len(self._references), 2 * self._most_of_a_step):
            for number in tuple(self._missing):
                self._forget(number)
        # One that was made before anybody looked is known from its first step on, and ends a step this once.
        if not self._missing or is_new:
            self._end_iteration()

    def _end_iteration(self) -> None:
        self._cycle_ended_step = True
        if _graph_task() != -1:
            self._ends_with_backward = True
        else:
            self._cut()

    def _cycle_ends(self) -> None:
        """Handle that work begins after updates: those since the work before belong together."""
        self._cycles += 1
        self._cycles_of_step += not self._cycle_ended_step
        self._has_joint_updates = self._has_joint_updates or len(self._cycle) > 1
        for number in tuple(self._cycle):  # a collection may remove one meanwhile
            self._cycles_with[number] = self._cycles_with.get(number, 0) + 1
        self._cycles_without_pace = 0 if self._pace in self._cycle else self._cycles_without_pace + 1
        if self._pace is not None and self._cycles_without_pace > _PATIENCE:
            self._forget_cycles()
        self._cycle = {}
        self._cycle_ended_step = False

    def _find_pace(self) -> None:
        """Find the optimizer that steps in all cycles: steps as they are found hold several of them."""
        if self._has_joint_updates or len(self._cycle) > 1:
            always = (number for number in tuple(self._cycle) if self._cycles_with.get(number, 0) == self._cycles)
            self._pace = next(always, None)

    def _forget_cycles(self) -> None:
        self._pace = None
        self._cycle, self._cycles_with = {}, {}
        self._cycle_ended_step = self._has_joint_updates = False
        self._cycles = self._cycles_of_step = self._cycles_without_pace = 0

    def _set_aside_optimizers(self) -> None:
        """Wait no more for the optimizers so far, until one of them steps again."""
        self._former.update(self._references)
        self._references.clear()
        self._missing.clear()
        self._of_step = self._most_of_a_step = 0
        self._forget_cycles()

    def _is_between_trainings(self) -> bool:
        # A loop that makes an optimizer in each iteration trains on.
        return self._has_begun and self._has_computed and not self._worked and not self._was_set_up

    def _is_between_steps(self) -> bool:
        return self.finding and self._has_begun and not self._worked and not self._evaluated_before

    def _begin_first_step(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._tracer.begin_step(self._first_number, is_found=True)

    def _return(self) -> None:
        if self._has_left:
            self._has_left = False
            self._tracer.return_to_step()

    def _cut(self) -> None:
        self._most_of_a_step = max(self._most_of_a_step, self._of_step)
        self._of_step = 0
        self._missing = set(self._references)
        self._evaluated, self._evaluated_before = False, self._evaluated
        self._is_set_up, self._was_set_up = False, self._is_set_up
        self._worked = self._ends_with_backward = self._has_left = False
        iterations = self._updates.step_ended()
        if iterations is not None:
            self._tracer.set_topology({"iterations": iterations})
        # Ranks may learn at different times that an optimizer sets the pace: the number of a step is its iteration's.
        skipped = self._cycles_of_step if self._pace is not None else 0
        self._cycles_of_step = 0
        self._tracer.begin_step(is_found=True, skipped=skipped)

    def _forget(self, number: int) -> None:
        self._references.pop(number, None)
        self._former.pop(number, None)
        self._missing.discard(number)
        # Another object may get the same id.
        self._stepped_alone.discard(number)
        self._cycle.pop(number, None)
        self._cycles_with.pop(number, None)
        if self._pace == number:
            self._forget_cycles()
