"""``commtrace preflight`` in real processes of gloo on emulated nodes: a sound cluster, and ranks that fail it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import Completed, fork
from tests.json_schemas import errors

pytestmark = pytest.mark.e2e

COMMAND = ["tests/e2e/programs/commtrace_command.py", "preflight", "--json"]


def told(job: Completed) -> Any:
    assert not job.timed_out, job.stdout
    (line,) = re.findall(r"^\{.*\}$", job.stdout, re.MULTILINE)
    verdict = json.loads(line)
    assert list(errors("preflight", verdict)) == []
    return verdict


def findings(verdict: Any) -> dict[tuple[str, str], str]:
    """Return the text of each finding by check and node."""
    return {(one["check"], node): one["text"] for one in verdict["findings"] for node in one["nodes"]}


def test_a_sound_cluster_passes_all_checks() -> None:
    job = fork(COMMAND, 4, {"RANKS_PER_NODE": "2"}, timeout=240)
    verdict = told(job)
    # Cores of a busy machine are not equally fast: what is judged of times is tested with made times.
    measured = {"device speed", "bandwidth"}
    other = [one for one in verdict["findings"] if one["check"] not in measured]

    assert other == [], job.stdout
    assert verdict["checked"][-3:] == ["device speed", "bandwidth within nodes", "bandwidth between nodes"]
    assert [one["node"] for one in verdict["nodes"]] == ["node0", "node1"]
    assert job.returncode == int(not verdict["good"])


def test_ranks_that_are_absent_stopped_or_set_up_otherwise_are_named_with_their_nodes(tmp_path: Path) -> None:
    faults = {"ABSENT": "5", "STOPPED": "3", "OTHERWISE": "4", "PID_FILE": str(tmp_path / "pid")}
    job = fork([*COMMAND, "--start-timeout", "15"], 6, {"RANKS_PER_NODE": "1", **faults}, timeout=240)
    verdict = told(job)
    found = findings(verdict)

    assert job.returncode == 1
    assert found["started", "node of rank 5"] == "rank 5 did not start, or did not reach rank 0, within 15 s"
    assert found["answers", "node3"] == "rank 3 started, but no longer answers"
    assert found["interface", "node4"] == "GLOO_SOCKET_IFNAME=no-such-interface: node4 has no such interface"
    assert "NCCL_ALGO is 'Tree' on rank 4, and not set on the others" in [one["text"] for one in verdict["findings"]]
    broken = {one["node"] for one in verdict["nodes"] if not one["good"]}
    assert {"node of rank 5", "node3", "node4"} <= broken
    assert not {"node0", "node1", "node2"} & {node for check, node in found if check in ("started", "answers")}


def test_a_rank_that_dies_while_bandwidth_is_measured_is_named() -> None:
    words = ["--network-timeout", "10"]
    job = fork([*COMMAND, *words], 3, {"RANKS_PER_NODE": "1", "FAULT": "SIGKILL@35"}, timeout=240)
    verdict = told(job)

    assert job.returncode == 1
    assert findings(verdict)["bandwidth", "node1"] == "rank 1 stopped answering while bandwidth was measured"
