"""``commtrace preflight`` in real processes of gloo on emulated nodes: a sound cluster, and ranks that fail it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import Completed, fork
from tests.json_schemas import errors

pytestmark = pytest.mark.e2e

COMMAND = ["tests/e2e/programs/commtrace_command.py", "preflight", "--json"]
fork_command = functools.partial(fork, imports=["commtrace.cli.commands.preflight"])


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
    job = fork_command(COMMAND, 4, {"RANKS_PER_NODE": "2"}, timeout=240)
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
    faults["SLURM_STEP_NODELIST"] = "gpu[0-5]"
    job = fork_command([*COMMAND, "--start-timeout", "15"], 6, {"RANKS_PER_NODE": "1", **faults}, timeout=240)
    verdict = told(job)
    found = findings(verdict)

    assert job.returncode == 1
    assert found["started", "gpu5"] == (
        "rank 5 did not start, or did not reach rank 0, within 15 s; no rank came from gpu5"
    )
    assert found["answers", "node3"] == "rank 3 started, but no longer answers"
    assert found["interface", "node4"] == "GLOO_SOCKET_IFNAME=no-such-interface: node4 has no such interface"
    assert "NCCL_ALGO is 'Tree' on rank 4, and not set on the others" in [one["text"] for one in verdict["findings"]]
    broken = {one["node"] for one in verdict["nodes"] if not one["good"]}
    assert {"gpu5", "node3", "node4"} <= broken
    assert not {"node0", "node1", "node2"} & {node for check, node in found if check in ("started", "answers")}


def test_a_rank_that_stops_while_bandwidth_is_measured_is_named(tmp_path: Path) -> None:
    faults = {"RANKS_PER_NODE": "1", "FAULT": "SIGSTOP@35", "PID_FILE": str(tmp_path / "pid")}
    job = fork_command([*COMMAND, "--network-timeout", "5"], 3, faults, timeout=240)
    verdict = told(job)

    assert job.returncode == 1
    assert findings(verdict)["bandwidth", "node1"] == "rank 1 stopped answering while bandwidth was measured"


def test_a_rank_that_dies_is_named_although_the_launcher_then_ends_all_others() -> None:
    job = fork_command(COMMAND, 3, {"RANKS_PER_NODE": "1", "FAULT": "SIGKILL@35"}, timeout=240)
    verdict = told(job)

    # Rank 0 learns it from gloo, or from the signal that follows: whichever comes first.
    said = {"rank 1 started, but no longer answers", "rank 1 stopped answering while bandwidth was measured"}
    named = {(node, text) for (check, node), text in findings(verdict).items() if check in ("answers", "bandwidth")}

    assert job.returncode == 1
    assert named
    assert named <= {("node1", text) for text in said}


def ended_by_sigterm(tmp_path: Path, faults: Mapping[str, str]) -> tuple[Completed, Any]:
    job = fork_command(COMMAND, 3, {"RANKS_PER_NODE": "1", "PIDS": str(tmp_path), **faults}, timeout=240)
    return job, told(job)


def test_sigterm_ends_the_wait_for_ranks_that_do_not_come(tmp_path: Path) -> None:
    faults = {"ABSENT": "2", "ALL_AFTER": "4", "SLURM_STEP_NODELIST": "gpu[0-2]"}
    job, verdict = ended_by_sigterm(tmp_path, faults)

    assert job.returncode == 1
    assert "ended with 143" in job.stdout
    assert verdict["seconds"] < 25  # not the 30 seconds that ranks have to come
    assert [(one["check"], one["nodes"]) for one in verdict["findings"]] == [("started", ["gpu2"]), ("time", [])]
    assert re.fullmatch(
        r"SIGTERM ended the checks after \d+ s; not checked: reachability, device speed, bandwidth within nodes, "
        "bandwidth between nodes",
        verdict["findings"][1]["text"],
    )


def test_sigterm_in_the_middle_of_a_collective_says_what_is_known(tmp_path: Path) -> None:
    job, verdict = ended_by_sigterm(tmp_path, {"FAULT": "SIGTERM@35"})

    assert job.returncode == 1
    assert "ended with 143" in job.stdout
    (ended,) = [one for one in verdict["findings"] if one["check"] == "time"]
    assert ended["text"].startswith("SIGTERM ended the checks after ")
    assert ended["text"].endswith("bandwidth between nodes")
    assert not [one for one in verdict["findings"] if one["check"] == "answers"]  # those who end with it have not died
    assert not verdict["good"]
