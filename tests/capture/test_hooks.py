"""Hooks of what this version of a framework has, with a warning where something is missing; torch.compile passes by."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.capture.guard import Guard
from commtrace.capture.hooks import Hooks


class Engine:
    def step(self) -> str:
        return "stepped"


def in_brackets(original: Any) -> Any:
    return lambda engine: f"[{original(engine)}]"


@pytest.fixture
def guard() -> Guard:
    return Guard()


@pytest.fixture
def hooks(guard: Guard) -> Hooks:
    tracer: Any = SimpleNamespace(guard=guard)
    return Hooks("engines", tracer)


def test_optional_names_that_are_missing_are_passed_over_in_silence(hooks: Hooks, guard: Guard) -> None:
    hooks.replace(Engine, "forward", in_brackets)

    assert guard.take_messages() == []
    assert not hasattr(Engine, "forward")


def test_names_that_every_version_has_are_warned_about_when_missing(
    hooks: Hooks, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.replace_required(Engine, "forward", in_brackets)

    [message] = guard.take_messages()
    assert message == (
        "engines: Engine has no forward in this version: what commtrace records there is missing. "
        "The tested versions are in docs/support.md."
    )
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, f"commtrace: {message}")
    ]
    assert hooks.active


def test_existing_names_are_replaced_and_put_back(hooks: Hooks, guard: Guard) -> None:
    hooks.replace_required(Engine, "step", in_brackets)
    assert Engine().step() == "[stepped]"

    hooks.restore()

    assert Engine().step() == "stepped"
    assert guard.take_messages() == []


PROGRAM = """
import sys
import torch
from commtrace.capture.hooks import keep_compiler_out
from commtrace.capture.tracer import Tracer
from commtrace.recording.recorder import Recorder

early = sys.argv[1] == "early"
if not early:
    import torch._dynamo
tracer = Tracer(Recorder(lambda: []))
uninstall = keep_compiler_out(tracer)
if early:
    assert "torch._dynamo" not in sys.modules, "capture must not import the compiler"
    import torch._dynamo
from torch._dynamo import trace_rules

assert trace_rules.check(Tracer.enter)
assert not trace_rules.check(Recorder.flush), "only capture is passed by"
uninstall()
assert not trace_rules.check(Tracer.enter)
assert tracer.guard.take_messages() == []
"""


def test_its_files_are_skipped_whoever_is_imported_first() -> None:
    for order in ("early", "late"):
        completed = subprocess.run([sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, timeout=120)
        assert completed.returncode == 0, completed.stderr
