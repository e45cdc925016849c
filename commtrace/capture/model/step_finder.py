"""Find the steps of a training loop without marks: each ends when every optimizer of the loop has stepped.

* The first step begins with the first forward or backward; an optimizer that steps once before only fills its state.
* An evaluation before a step's first work is no part of it, unless the step before had one too.
* Work that no optimizer has ended is not recorded. An integration or ``commtrace.step`` takes over for good.
"""

from __future__ import annotations

import weakref
from typing import Final, Protocol

import torch

_PATIENCE: Final = 8
"""Optimizers that did not step are given up after so many steps per optimizer of the loop:
a critic that is trained five times as often as its generator is waited for."""


class StepMarker(Protocol):
    """The part of the tracer that a finder needs."""

    def begin_step(self, number: int | None = None, *, is_users: bool = False, is_found: bool = False) -> None: ...

    def restart_step(self) -> None: ...

    def leave_step(self) -> None: ...

    def return_to_step(self) -> None: ...

    def discard_step(self, *, frees_number: bool = False) -> None: ...


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

    def give_way(self, *, is_users: bool) -> None:
        """Find no steps from now on: an integration or the script marks them."""
        self.is_marked_by_framework = self.is_marked_by_framework or not is_users
        if self.finding:
            self.finding = False
            self._references.clear()
            if self._has_begun:
                self._tracer.discard_step(frees_number=True)

    def optimizer_begins(self, optimizer: object) -> None:
        if not self.finding or self._has_computed:
            self.work_begins()
        elif id(optimizer) not in self._stepped_alone:
            self._stepped_alone.add(id(optimizer))
            self._begin_first_step()
            self._has_left = True
            self._tracer.leave_step()
        else:
            self._has_computed = True
            self._return()
            self._cut()
            self.work_begins()

    def begins_with(self, number: int) -> bool:
        """Set the program's number of the first step; return False if it is too late or steps are marked."""
        if not self.finding or self._has_begun:
            return False
        self._first_number = number
        return True

    def work_begins(self) -> None:
        if not self.finding:
            return
        if not self._has_computed:
            self._has_computed = True
            self._begin_first_step()
            if self._stepped_alone:
                self._tracer.restart_step()
        elif self._ends_with_backward and not _is_in_backward():
            self._cut()  # the end of that backward was not seen
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
        own = {id(parameter) for parameter in model.parameters()}
        for reference in tuple(self._references.values()):
            groups = getattr(reference(), "param_groups", None) or ()
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            if stepped and stepped <= own:
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
        is_new = id(optimizer) not in self._references
        self.optimizer_made(optimizer)
        if not self._has_computed:
            return
        self._missing.discard(id(optimizer))
        self._of_step += 1
        if self._missing and self._of_step > max(_PATIENCE * len(self._references), 2 * self._most_of_a_step):
            for number in tuple(self._missing):
                self._forget(number)
        # One that was made before anybody looked is known from its first step on, and ends a step this once.
        if self._missing and not is_new:
            return
        if _is_in_backward():
            self._ends_with_backward = True
        else:
            self._cut()

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
        self._worked = self._ends_with_backward = self._has_left = False
        self._tracer.begin_step(is_found=True)

    def _forget(self, number: int) -> None:
        self._references.pop(number, None)
        self._missing.discard(number)


def _is_in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1
