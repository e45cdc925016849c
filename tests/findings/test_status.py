"""What the monitor says is the same in a file, in a message and in memory, and is refused beyond its bounds."""

from __future__ import annotations

import json

import msgspec
import pytest

from commtrace.findings.status import LiveEvent, MonitorStatus
from commtrace.trace.json_values import fields_to_json
from tests.live.findings import hang_finding, not_judged, silent_finding, slow_finding, status

TOLD = status(hang_finding(), silent_finding(), slow_finding(), not_judged("Nobody knows."))


def test_a_state_is_read_as_it_was_written() -> None:
    for text in (json.dumps(fields_to_json(TOLD)).encode(), msgspec.json.encode(TOLD)):
        assert msgspec.json.decode(text, type=MonitorStatus) == TOLD


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "back"},
        {"time_ns": 2**63},
        {"time_ns": "now"},
        {"finding": None},
        {"finding": {**fields_to_json(slow_finding()), "ranks": [-1]}},
        {"finding": {**fields_to_json(slow_finding()), "kind": "tired"}},
        {"finding": {**fields_to_json(slow_finding()), "cost_ns": 1e300}},
    ],
)
def test_an_event_beyond_its_bounds_is_refused(changes: dict[str, object]) -> None:
    event = fields_to_json(LiveEvent("found", 5, slow_finding(), "Said."))
    assert msgspec.json.decode(json.dumps(event), type=LiveEvent).finding == slow_finding()
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({**event, **changes}), type=LiveEvent)
