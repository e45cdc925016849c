"""The engine that a configuration gets, and what a recording says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch

import commtrace
from commtrace import _native
from commtrace.capture import engine
from commtrace.config import Config
from commtrace.trace.files.reader import load_run

NOT_BUILT = (None, _native.NOT_BUILT)


def loads(monkeypatch: pytest.MonkeyPatch, result: tuple[ModuleType | None, str]) -> None:
    monkeypatch.setattr(_native, "load", lambda: result)


@pytest.mark.parametrize("asked", ["auto", "native"])
def test_the_native_engine_records_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    core = ModuleType("core")
    loads(monkeypatch, (core, ""))

    assert engine.choose(Config(engine=asked)) == ("native", "", core)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, (ModuleType("core"), ""))

    assert engine.choose(Config(engine="python")) == ("python", "switched off by COMMTRACE_ENGINE=python", None)


def test_without_it_python_records_and_knows_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads(monkeypatch, NOT_BUILT)

    assert engine.choose(Config()) == ("python", _native.NOT_BUILT, None)
    assert caplog.messages == []


def test_a_native_engine_that_cannot_be_had_is_warned_about_once_per_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads(monkeypatch, (None, "it cannot be loaded: no such file"))
    for local_rank in ("0", "1"):
        for name, value in (("RANK", local_rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", local_rank)):
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.WARNING):
            assert engine.choose(Config(engine="native")).name == "python"

    assert caplog.messages == [
        "commtrace records with its Python engine, not with the native one: it cannot be loaded: no such file"
    ]


def _record(folder: Path, asked: str) -> None:
    commtrace.start(commtrace.Config(dir=str(folder), engine=asked))
    try:
        for step in range(2):
            with commtrace.step(step):
                pass
    finally:
        commtrace.stop()


def test_the_recording_says_which_engine_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _record(tmp_path / "off", "python")
    loads(monkeypatch, NOT_BUILT)
    _record(tmp_path / "vain", "native")

    assert load_run(tmp_path / "off").ranks[0].engine == {
        "name": "python",
        "reason": "switched off by COMMTRACE_ENGINE=python",
    }
    assert load_run(tmp_path / "vain").ranks[0].engine == {"name": "python", "reason": _native.NOT_BUILT}


def test_the_native_engine_records_on_rocm_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ModuleType("core")
    loads(monkeypatch, (core, ""))
    monkeypatch.setattr(torch.version, "hip", "6.2")

    assert engine.choose(Config()) == ("python", engine.UNTRIED_ON_ROCM, None)
    assert engine.choose(Config(engine="native")) == ("native", "", core)
