from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from commtrace.trace.run import OsExit, Run
from commtrace.viewer.health import health_resources
from tests.factory import make_run, metadata
from tests.viewer.hang_reports import EVERYONE, hang


def job(**changes: dict[int, Any]) -> Run:
    """A run of three ranks; ``changes`` are by field of the trace, then by rank."""
    run = make_run({0: [], 1: [], 2: []}, [EVERYONE])
    ranks = {
        rank: replace(trace, **{name: of_rank[rank] for name, of_rank in changes.items() if rank in of_rank})
        for rank, trace in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def health(run: Run) -> Any:
    return json.loads(health_resources(run)["health.json"])


def test_a_sound_run_has_nothing_to_say() -> None:
    assert health(job()) == {"differing": [], "dropped": [], "failed": [], "hangs": [], "problems": []}


def test_versions_and_variables_that_differ_are_listed_with_their_ranks() -> None:
    newer = replace(metadata(2), versions={"torch": "2.14.0"}, environment={"NCCL_ALGO": "Ring", "NODE_NAME": "n2"})
    same = replace(metadata(0), versions={"torch": "2.13.0"})

    found = health(job(metadata={0: same, 1: replace(same, rank=1), 2: newer}))["differing"]

    assert found == [
        {
            "kind": "version",
            "name": "torch",
            "values": [{"value": "2.13.0", "ranks": [0, 1]}, {"value": "2.14.0", "ranks": [2]}],
        },
        {
            "kind": "variable",
            "name": "NCCL_ALGO",
            "values": [{"value": "Ring", "ranks": [2]}, {"value": None, "ranks": [0, 1]}],
        },
    ]


def test_lost_spans_and_exceptions_are_of_their_ranks() -> None:
    found = health(job(dropped={1: {"stall": 7}}, exception={2: "ValueError"}, exception_frames={2: ("train.py:3 f",)}))

    assert found["dropped"] == [{"rank": 1, "kinds": {"stall": 7}}]
    assert found["failed"] == [{"rank": 2, "exception": "ValueError", "frames": ["train.py:3 f"]}]


def test_calls_of_os_exit_are_of_their_ranks() -> None:
    found = health(job(exit={0: OsExit(3, frames=("train.py:3 f",)), 1: OsExit(1, "KeyError")}))

    assert found["failed"] == [
        {"rank": 0, "exception": "os._exit(3)", "frames": ["train.py:3 f"]},
        {"rank": 1, "exception": "os._exit(1) while it handled a KeyError", "frames": []},
    ]


def test_ranks_that_hang_at_the_same_place_are_one(tmp_path: Path) -> None:
    for rank, frames in enumerate([("train.py:9 wait", "train.py:1 main")] * 2 + [("data.py:4 read",)]):
        folder = tmp_path / f"rank-{rank:05}"
        folder.mkdir()
        (folder / "hang-001.json").write_text(json.dumps(hang(rank, "old.py:1 f").to_json()))
        (folder / "hang-002.json").write_text(json.dumps(hang(rank, *frames).to_json()))

    hangs = health(replace(job(), path=tmp_path))["hangs"]

    assert [(one["ranks"], one["no_progress_ns"]) for one in hangs] == [([0, 1], 60_000_000_001), ([2], 60_000_000_002)]
    assert hangs[0]["utc"] == "2023-11-14T22:13:20+00:00"
    assert hangs[0]["in_flight"] == ["all_reduce of dp"]
    assert hangs[0]["threads"] == [{"thread": "MainThread", "frames": ["train.py:9 wait", "train.py:1 main"]}]


def test_reports_of_other_recordings_do_not_count_and_damaged_ones_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    (folder / "hang-001.json").write_text(json.dumps(hang(0, "f", session=99).to_json()))
    (folder / "hang-002.json").write_text("{")

    found = health(replace(job(), path=tmp_path))

    assert found["hangs"] == []
    assert len(found["problems"]) == 1
    assert "hang-002.json: not read: Input data was truncated" in found["problems"][0]
