"""``commtrace bench replay`` in real processes of gloo, of a run whose every time is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commtrace.trace import schema
from commtrace.trace.schema import Row
from tests.e2e.launch import fork
from tests.factory import group
from tests.json_schemas import errors
from tests.trace.rows import mark, row, write_rank

pytestmark = pytest.mark.e2e

COMMAND = ["tests/e2e/programs/commtrace_command.py", "bench", "replay"]
MS = 1_000_000
DP, PP = group("dp", 0, 1), group("pp", 0, 1, ordinal=1)


def write_run(directory: Path) -> Path:
    """Four steps of 60 ms. Rank 1 computes for 30 ms and rank 0 for 10, in front of an all-reduce; then a message."""
    for rank in range(2):
        tables = [mark("process_group", {**one.to_json(), "name": one.role}) for one in (DP, PP)]
        rows = [*tables, *(own for step in range(4) for own in _step(rank, step)), mark("end", {})]
        write_rank(directory, rows, rank=rank, world_size=2)
    return directory


def _step(rank: int, step: int) -> list[Row]:
    begin = 60 * MS * step
    starts, ends = begin + (10, 30)[rank] * MS, begin + 35 * MS
    reduce = {"name": "all_reduce", "group": DP.id, "seq": step, "op_in_seq": 0, "step": step}
    message = {"name": ("send", "recv")[rank], "group": PP.id, "seq": step, "op_in_seq": 0, "step": step}
    at = begin + 40 * MS
    return [
        row(kind=schema.STEP, name="step", step=step, start=begin, end=begin + 60 * MS),
        row(kind=schema.FORWARD, step=step, microbatch=0, start=begin, end=starts),
        row(kind=schema.COLLECTIVE, lane=schema.COMMUNICATION, start=starts, end=ends, id=2 * step, bytes=1 << 20,
            dtype="bfloat16", **reduce),
        row(kind=schema.STALL, start=starts, end=ends, stalled_on=2 * step, **reduce),
        row(kind=schema.P2P, lane=schema.COMMUNICATION, start=at, end=at + MS, id=2 * step + 1, bytes=4096,
            peer=1 - rank, dtype="float32", is_async=True, **message),
        row(kind=schema.STALL, start=at + MS // 2, end=at + MS, stalled_on=2 * step + 1, peer=1 - rank, **message),
    ]  # fmt: skip


def test_the_same_calls_are_made_with_the_same_gaps(tmp_path: Path) -> None:
    job = fork([*COMMAND, str(write_run(tmp_path / "run")), "--json", "--timeout", "60"], 2)
    assert job.returncode == 0, job.stdout
    told = json.loads(re.findall(r"^\{.*\}$", job.stdout, re.MULTILINE)[0])

    assert list(errors("bench-replay", told)) == []
    assert (told["steps"], told["recorded_step_ns"], told["notes"]) == (3, 60 * MS, [])
    rows = {(one["role"], one["operation"]): one for one in told["rows"]}
    assert {key: (one["calls"], one["num_bytes"]) for key, one in rows.items()} == {
        ("dp", "all_reduce"): (6, 6 << 20),
        ("pp", "send"): (3, 3 * 4096),
        ("pp", "recv"): (3, 3 * 4096),
    }
    assert rows["dp", "all_reduce"]["recorded_ns"] == 3 * (25 + 5) * MS
    # rank 0 waits for the 20 ms that rank 1 comes later; a busy machine only makes it more
    assert rows["dp", "all_reduce"]["replayed_ns"] > 3 * 15 * MS
    assert told["replayed_step_ns"] >= 54 * MS


def test_another_number_of_ranks_ends_every_process(tmp_path: Path) -> None:
    job = fork([*COMMAND, str(write_run(tmp_path / "run")), "--timeout", "60"], 1)

    assert job.returncode not in (0, None)
    assert not job.timed_out
    assert "the run has 2 ranks, and this job 1: start as many as the run has" in job.stdout
