"""Requests for detail: absolute steps ahead of every rank, each seen once."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.trace.selection.trigger import first_step_after, make_request, read_requests, write_request


def test_the_steps_lie_ahead_by_seconds_and_at_least_three_steps() -> None:
    assert first_step_after(100, 20e6) == 351
    assert first_step_after(100, 30e9) == 103
    assert first_step_after(100, None) == 120
    assert first_step_after(100, 1e9, margin_seconds=60) == 161


def test_requests_are_read_once_oldest_first(tmp_path: Path) -> None:
    assert read_requests(tmp_path) == []
    second = make_request("r1", 0, 50, 10, by="command", modules="depth=2", now_ns=2)
    first = make_request("r1", 0, 5, 1, by="command", now_ns=1)
    for request in (second, first):
        write_request(tmp_path, request)

    assert read_requests(tmp_path) == [first, second]
    assert read_requests(tmp_path, {first.id}) == [second]
    assert (second.first, second.end, 59 in second.steps, 60 in second.steps) == (50, 60, True, False)
    assert sorted(path.name for path in (tmp_path / "triggers").iterdir()) == ["1-command.json", "2-command.json"]


def test_what_is_no_request_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "triggers").mkdir()
    (tmp_path / "triggers" / "1.json").write_text("{}")
    with pytest.raises(ValueError, match="is no request for steps in detail"):
        read_requests(tmp_path)
