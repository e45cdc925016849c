"""Steps as they are read for a replay."""

from __future__ import annotations

import numpy as np

from commtrace.analysis.chain import analyse
from commtrace.analysis.prediction.recorded_steps import RecordedSteps
from tests.factory import group, make_run, p2p, span, stall


def test_a_send_that_is_asked_for_late_was_over_when_its_message_was_received() -> None:
    """Rank 0 sends at 10, works until 100 and only then asks for its send; rank 1 has had the message at 12."""
    pipeline = group("pp", 0, 1)
    send = p2p("send", pipeline, 1, 0, 10, 100, id=1, step=0)
    receive = p2p("recv", pipeline, 0, 0, 0, 12, id=2, step=0)
    run = make_run(
        {
            0: [span("step", 0, 120, step=0), send],
            1: [span("step", 0, 120, step=0), receive, stall(receive, 0, 12)],
        },
        [pipeline],
    )

    recorded = RecordedSteps.of(analyse(run, "0:"), np.array([0]))

    assert recorded.joins.transfers.ns.tolist() == [90, 2]
    assert recorded.transfer_ns.tolist() == [2, 2]
