"""Count the updates in each step that is found: a step in which an optimizer steps twice holds two iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from commtrace.trace.topology import Iterations

_MOST_NAMES: Final = 16
"""Number of classes of optimizers that are told apart."""


_Counts: TypeAlias = "dict[tuple[int, str], int]"
"""Updates of a step by the id and the class of the optimizer."""


class StepUpdates:
    def __init__(self) -> None:
        self._of_step: _Counts = {}
        self._of_step_before: _Counts = {}
        self._known: Iterations | None = None

    def add(self, optimizer: object) -> None:
        key = id(optimizer), type(optimizer).__name__
        self._of_step[key] = self._of_step.get(key, 0) + 1

    def step_ended(self) -> Iterations | None:
        """Return what is known of all steps if this one has changed it, and some hold more than one iteration."""
        of_step, before = self._of_step, self._of_step_before
        if not of_step:
            return None
        self._of_step, self._of_step_before = {}, of_step
        known = self._known
        if known is not None and known["most"] and of_step == before:  # as nearly always
            return None
        most = max(of_step.values())
        if known is None:
            changed: Iterations = {"first": most, "fewest": 0, "most": 0, "updates": _by_name({}, of_step)}
        elif not known["most"]:  # from now on of the later steps
            changed = {"first": known["first"], "fewest": most, "most": most, "updates": _by_name({}, of_step)}
        else:
            changed = {
                "first": known["first"],
                "fewest": min(known["fewest"], most),
                "most": max(known["most"], most),
                "updates": _by_name(known["updates"], of_step),
            }
        self._known = changed
        return changed if changed != known and max(changed["first"], changed["most"]) > 1 else None


def _by_name(known: dict[str, list[int]], of_step: _Counts) -> dict[str, list[int]]:
    """Widen the fewest and the most updates of an optimizer of each class by those of a step."""
    bounds = {name: list(fewest_and_most) for name, fewest_and_most in known.items()}
    for (_, name), count in of_step.items():
        if name in bounds:
            fewest, most = bounds[name]
            bounds[name] = [min(fewest, count), max(most, count)]
        elif len(bounds) < _MOST_NAMES:
            bounds[name] = [count, count]
    return bounds
