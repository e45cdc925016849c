"""A signal in the middle of the checks: rank 0 says what is known, and blames nobody who would have answered."""

from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
import torch.distributed as dist

from commtrace.benchmarks import preflight
from commtrace.benchmarks.facts import RankFacts
from commtrace.benchmarks.preflight import PreflightLimits
from tests.benchmarks.rank_facts import facts


@pytest.fixture
def checks() -> preflight._Checks:
    """Rank 0 of two ranks that have come, on one node."""
    store = dist.HashStore()
    for rank in range(2):
        here = replace(facts(rank), address="127.0.0.1", versions={}, environment={})
        store.set(f"facts-{rank}", json.dumps(asdict(here)))
    return preflight._Checks(0, 2, 0, store, "gloo", PreflightLimits(30, 30), preflight._PreflightProgress(ranks=2))


def test_a_signal_while_ranks_ask_one_another_blames_none_that_has_not_told_yet(checks: preflight._Checks) -> None:
    found = checks.progress
    present = checks._meet()
    checks.store.set("reached-0", "[]")  # rank 1 still asks
    is_asking, may_answer = threading.Event(), threading.Event()

    def answers_late(_target: RankFacts) -> bool:
        is_asking.set()
        return may_answer.wait(30)

    agreeing = threading.Thread(target=checks._agree, args=(present,), daemon=True)
    with patch.object(preflight, "answers", answers_late):
        agreeing.start()
        told = threading.Thread(
            target=preflight._report_what_is_known, args=(found, signal.SIGTERM, time.monotonic(), lambda: None)
        )
        told.start()
        assert is_asking.wait(30)
        agreeing.join(0.5)  # it sees the signal within 0.05 s
        may_answer.set()
        told.join(30)

    assert agreeing.is_alive()  # the thread of the signal ends the process
    assert [one.check for one in found.findings] == ["time"]
    assert "not checked: reachability, device speed" in found.findings[0].text
    assert "reachability" not in found.checked
