"""The extension without the rest of commtrace: methods made by hand, and rows as dictionaries.

core = BareCore()
all_reduce = core.method(lambda group, tensors, options: None)
all_reduce(core.group, [torch.zeros(4)], SYNCHRONOUS)
assert [row["seq"] for row in core.take()] == [0]
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from commtrace import _native
from commtrace.capture.native import _columns
from tests.native.simulated_driver import SimulatedDriver
from tests.waiting import until

SYNCHRONOUS: Final = SimpleNamespace(asyncOp=False, rootRank=0)
ASYNCHRONOUS: Final = SimpleNamespace(asyncOp=True, rootRank=0)
NO_PLACE: Final = (-1, -1, -1, -1)


def load_core() -> Any:
    """Return the extension; skip the test where it was not built."""
    core, reason = _native.load()
    if core is None:
        pytest.skip(f"the native part: {reason}")
    return core


class Slow:
    """Stands for the Python path: remembers its calls, and passes them on."""

    def __init__(self, original: Callable[..., object]) -> None:
        self.original = original
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> object:
        self.calls.append(arguments)
        return self.original(*arguments, **keywords)


class ProcessGroup:
    """Its address is all that counts."""


class BareCore:
    """The extension for one recording of its own."""

    def __init__(self, capacity: int = 100_000, **configuration: Any) -> None:
        self.core = load_core()
        self.core.reset(capacity)
        self.errors: list[Exception] = []
        self.configure(**configuration)
        self.process_group = ProcessGroup()
        self.counters = self.group(self.process_group)
        self.core.set_recording(True)

    def configure(self, **changed: Any) -> None:
        nothing: Callable[..., None] = lambda *arguments: None  # noqa: E731
        usual: dict[str, Any] = {
            "tensor_types": (torch.Tensor,), "p2p_codes": (None,) * 4, "code_of_dtype": lambda dtype: 1,
            "failed": self.errors.append, "wait_failed": nothing, "waited_on_a_side": nothing, "pending": (None, None),
            "forget_in_python": nothing, "times_devices": False, "raw_stream": None, "current_device": None,
            "open_device": None,
        }  # fmt: skip
        self.core.configure(**{**usual, **changed})

    def use_driver(
        self,
        driver: SimulatedDriver,
        raw_stream: Callable[[int], int],
        tensor_types: tuple[type, ...] = (torch.Tensor,),
    ) -> None:
        """Take marks on device 0 of the simulated driver, which the first mark opens."""

        def open_device() -> bool:
            self.core.open_driver(str(driver.path), True)
            return True

        self.configure(
            tensor_types=tensor_types, times_devices=True, raw_stream=raw_stream, current_device=lambda: 0,
            open_device=open_device,
        )  # fmt: skip

    def resolved(self, mark: object, timeout_seconds: float = 20.0) -> int:
        """Return the time of a mark, ns, once the device has passed it."""

        def passed() -> tuple[int] | None:
            time_ns = self.core.resolve(mark)
            return None if time_ns is None else (time_ns,)

        (time_ns,) = until(passed, timeout_seconds, every=0.002) or (0,)
        return time_ns

    def group(self, process_group: object, num_ranks: int = 4) -> Any:
        return self.core.Group(process_group, 7, tuple(range(num_ranks)), True, False)

    def method(self, original: Callable[..., object], slow: Callable[..., object] | None = None, **facts: Any) -> Any:
        return self.core.Method(original, slow or Slow(original), operation=0, name=0, **facts).function()

    def wait(self, original: Callable[..., object], slow: Callable[..., object] | None = None) -> Any:
        return self.core.Method(original, slow or Slow(original), is_wait=True).function()

    def take(self, *kinds: int) -> list[dict[str, Any]]:
        """Return the rows since the last time, those of calls too, as dictionaries."""
        num_rows, of_rows, num_calls, of_calls = self.core.take()
        layout = self.core.ROW_COLUMNS
        tables = (num_rows, of_rows, layout), (num_calls, of_calls, (*layout, *self.core.CALL_COLUMNS))
        rows = []
        for number, columns_of, names in tables:
            columns = {name: column.tolist() for name, column in _columns(number, columns_of, names).items()}
            rows += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [row for row in rows if not kinds or row["kind"] in kinds]

    def num_dropped(self, *kinds: int) -> int:
        dropped = self.core.dropped()
        return sum(dropped[kind] for kind in kinds or range(len(dropped)))
