"""Hooks of torch's optimizers that can come and go at any time, also while torch calls hooks.

torch goes through two tables of hooks while it calls them, and raises into ``optimizer.step()`` when a table changes
meanwhile and another hook follows: a script that starts or stops the recording in a hook of its own would die of it. So
ours are never put into a table. While there are some, a stand-in has the table's place in :mod:`torch.optim.optimizer`,
where torch looks it up for each round of calls: a round that has begun ends as it would have, and the table itself
changes only when others register their hooks or take them out.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

from commtrace.hook_table import HookTable as HookTable

BEFORE_STEP: Final = "_global_optimizer_pre_hooks"
AFTER_STEP: Final = "_global_optimizer_post_hooks"
"""The tables of torch.optim.optimizer, by their names there."""


_stand_ins: Final[list[HookTable]] = []
"""One for each table, kept for good: handles of hooks that others register while it stands in refer to it weakly, and
must still find the table when it does so no more."""


class OptimizerHook:
    """One hook for the steps of all optimizers, called before those that others have registered.

    Args:
        table: :data:`BEFORE_STEP` or :data:`AFTER_STEP`.
        call: gets what torch passes.
        failed: is told what fails.

    Raises:
        AttributeError: this version of torch has no such table.
    """

    def __init__(self, table: str, call: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._name = table
        self._call = call
        self.failed = failed
        self._is_off = False
        module = _module()
        self._stand_in = _stand_in_for(getattr(module, table))
        try:
            self._stand_in.ours.append(self)
            setattr(module, table, self._stand_in)
        except BaseException:
            self.remove()
            raise

    def __call__(self, *arguments: Any) -> None:
        try:
            if not self._is_off:
                self._call(*arguments)
        except Exception as error:
            self.failed(error)

    def remove(self) -> None:
        """Take the hook out; it is not called again, not even in a round of calls that has begun."""
        self._is_off = True
        stand_in, module = self._stand_in, _module()
        with suppress(ValueError):  # It has been taken out before.
            stand_in.ours.remove(self)
        if not stand_in.ours and getattr(module, self._name) is stand_in:
            setattr(module, self._name, stand_in.table)


def _module() -> ModuleType:
    from torch.optim import optimizer

    return optimizer


def _stand_in_for(table: MutableMapping[int, Any]) -> HookTable:
    if isinstance(table, HookTable):
        return table
    for stand_in in _stand_ins:
        if stand_in.table is table:
            return stand_in
    import torch

    _stand_ins.append(HookTable(table, torch.compiler.is_dynamo_compiling))
    return _stand_ins[-1]
