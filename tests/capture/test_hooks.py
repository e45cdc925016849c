"""Hooks of what this version of a framework has, and a word about what it should have."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from commtrace.capture.guard import Guard
from commtrace.capture.hooks import Hooks


class Engine:
    def step(self) -> str:
        return "stepped"


def in_brackets(original):  # type: ignore[no-untyped-def]
    return lambda engine: f"[{original(engine)}]"


@pytest.fixture
def guard() -> Guard:
    return Guard()


@pytest.fixture
def hooks(guard: Guard) -> Hooks:
    return Hooks("engines", SimpleNamespace(guard=guard))  # type: ignore[arg-type]


def test_what_may_be_missing_is_passed_over_in_silence(hooks: Hooks, guard: Guard) -> None:
    hooks.replace(Engine, "forward", in_brackets)

    assert guard.take_messages() == []
    assert not hasattr(Engine, "forward")


def test_what_every_tried_version_has_is_missed_aloud(
    hooks: Hooks, guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.replace_required(Engine, "forward", in_brackets)

    [told] = guard.take_messages()
    assert told == (
        "engines: Engine has no forward in this version, which commtrace would hook: what it records there is missing. "
        "The versions that were tried are in docs/support.md."
    )
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, f"commtrace: {told}")
    ]
    assert hooks.active


def test_what_is_there_is_replaced_and_put_back(hooks: Hooks, guard: Guard) -> None:
    hooks.replace_required(Engine, "step", in_brackets)
    assert Engine().step() == "[stepped]"

    hooks.restore()

    assert Engine().step() == "stepped"
    assert guard.take_messages() == []
