"""A request for steps in detail: when it takes effect, whose a rank follows, and the mark of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from commtrace.capture.tracer import Tracer
from commtrace.capture.triggers import Triggers
from commtrace.recording.recorder import Recorder
from commtrace.trace.selection import StepRange, make_request, write_request
from tests.trace.rows import metadata

SESSION = metadata().session


class Modules:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.tracer: Tracer | None = None

    def _note(self, what: str) -> None:
        assert self.tracer is not None
        self.calls.append((what, self.tracer.coordinates.step))

    def select(self, spec: str) -> None:
        self._note(spec)

    def clear(self) -> None:
        self._note("clear")


def opened(directory: Path, window: str | None = None) -> tuple[Tracer, Triggers, Modules]:
    tracer = Tracer(Recorder(list), window=StepRange.parse(window) if window else None)
    tracer.detail.every = 0
    modules = Modules()
    modules.tracer = tracer
    triggers = Triggers(tracer, modules)
    triggers.open(directory, metadata())
    return tracer, triggers, modules


def ask(directory: Path, first: int, steps: int, **changes: Any) -> None:
    fields = {"run_id": "r1", "attempt": 0, "by": "test", "now_ns": SESSION + first, **changes}
    write_request(directory, make_request(fields.pop("run_id"), fields.pop("attempt"), first, steps, **fields))


def test_a_request_takes_effect_in_its_steps_and_then_all_is_as_before(tmp_path: Path) -> None:
    tracer, triggers, modules = opened(tmp_path)
    tracer.begin_step(0)
    ask(tmp_path, 3, 2, modules="depth=2")
    recorded = list(triggers.marks())
    for step in range(1, 8):
        tracer.begin_step(step)

    assert recorded == [
        (
            "trigger",
            {
                "id": f"{SESSION + 3}-test", "first": 3, "end": 5, "modules": "depth=2", "by": "test",
                "seen_at_step": 0, "late": False,
            },
        )
    ]  # fmt: skip
    assert [step for step in range(8) if tracer.detail.details(step)] == [3, 4]
    assert modules.calls == [("depth=2", 3), ("clear", 5)]
    assert list(triggers.marks()) == []


def test_a_request_that_is_seen_too_late_is_followed_from_now_on_and_said_to_be_late(tmp_path: Path) -> None:
    tracer, triggers, modules = opened(tmp_path)
    tracer.begin_step(4)
    ask(tmp_path, 3, 5, modules="depth=2")
    [(_, recorded)] = triggers.marks()
    tracer.begin_step(5)

    assert (recorded["late"], recorded["seen_at_step"]) == (True, 4)
    assert tracer.detail.details(5)
    assert modules.calls == [("depth=2", 5)]


def test_requests_to_other_runs_and_to_earlier_sessions_are_not_followed(tmp_path: Path) -> None:
    tracer, triggers, _ = opened(tmp_path)
    ask(tmp_path, 3, 5, run_id="r2")
    ask(tmp_path, 4, 5, attempt=1)
    ask(tmp_path, 5, 5, now_ns=SESSION - 1)

    assert list(triggers.marks()) == []
    assert tracer.detail.requested == ()


def test_steps_outside_the_window_can_be_asked_for(tmp_path: Path) -> None:
    tracer, triggers, _ = opened(tmp_path, window="0:2")
    ask(tmp_path, 5, 2)
    list(triggers.marks())
    recorded = []
    for step in range(9):
        tracer.begin_step(step)
        recorded.append(tracer.recording)

    assert recorded == [True, True, False, False, False, True, True, False, False]


def test_a_signal_asks_all_ranks_and_the_earlier_handler_is_called_and_put_back(tmp_path: Path) -> None:
    tracer, triggers, _ = opened(tmp_path)
    seen: list[int] = []

    def own(number: int, _frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGUSR2, own)
    try:
        triggers.listen("SIGUSR2")
        tracer.begin_step(7)
        os.kill(os.getpid(), signal.SIGUSR2)
        [(_, recorded)] = triggers.marks()
        triggers.uninstall()
        assert signal.getsignal(signal.SIGUSR2) is own
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert seen == [signal.SIGUSR2]
    assert (recorded["first"], recorded["end"], recorded["by"], recorded["late"]) == (27, 37, "signal-to-rank-0", False)
    assert len(list((tmp_path / "triggers").iterdir())) == 1


def test_a_file_that_cannot_be_read_is_refused_once_and_other_requests_are_followed(tmp_path: Path) -> None:
    tracer, triggers, _ = opened(tmp_path)
    ask(tmp_path, 3, 2)
    folder = tmp_path / "triggers"
    (folder / "0.json").write_text("{")
    (folder / "1.json").mkdir()
    (folder / "2.json").symlink_to(folder / "nowhere")
    assert [name for name, _ in triggers.marks()] == ["trigger"]
    assert list(triggers.marks()) == []
    assert [message.partition(" is refused: ")[0] for message in sorted(tracer.guard.take_messages())] == [
        f"the request for detail '{name}'" for name in (0, 1, 2)
    ]
    ask(tmp_path, 8, 2)
    assert [detail["first"] for _, detail in triggers.marks()] == [8]


def test_a_folder_full_of_other_files_is_told_of_sixteen_times(tmp_path: Path) -> None:
    tracer, triggers, _ = opened(tmp_path)
    (tmp_path / "triggers").mkdir()
    for number in range(40):
        (tmp_path / "triggers" / f"{number}.json").write_text("")
    assert list(triggers.marks()) == []
    assert len(tracer.guard.take_messages()) == 16


def test_a_folder_that_cannot_be_read_is_told_of_once_and_looked_at_again(tmp_path: Path) -> None:
    tracer, triggers, _ = opened(tmp_path)
    (tmp_path / "triggers").write_text("in the way")
    assert list(triggers.marks()) == []
    assert list(triggers.marks()) == []
    (message,) = tracer.guard.take_messages()
    assert "requests for detail cannot be read" in message
    (tmp_path / "triggers").unlink()
    ask(tmp_path, 3, 2)
    assert len(list(triggers.marks())) == 1


@pytest.mark.parametrize("modules", [r"re:(\w)\1", "re:(", "x" * 5_000, "depth=x"])
def test_a_request_for_modules_that_cannot_be_matched_is_refused_with_the_reason(tmp_path: Path, modules: str) -> None:
    tracer, triggers, chosen = opened(tmp_path)
    tracer.begin_step(0)
    ask(tmp_path, 3, 2, modules=modules)
    assert list(triggers.marks()) == []
    (message,) = tracer.guard.take_messages()
    assert "is refused: modules " in message
    tracer.begin_step(3)
    assert chosen.calls == []
    assert not tracer.detail.details(3)
