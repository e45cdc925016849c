"""Real traces of other projects: every number was computed elsewhere, with interval unions over all device events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from commtrace.analysis.chain import analyse
from commtrace.analysis.matching.match import blame_ns
from commtrace.cli.main import app
from tests.findings.reading import in_json
from tests.interchange.traces.reference_traces import dlrm
from tests.reference import reference_data


class Answer(NamedTuple):
    """All in ns."""

    span: int
    idle: int
    compute: int
    communication: int
    overlap: int
    exposed: int
    exposed_memory: int


DLRM = {
    0: Answer(13009000, 6419000, 1034000, 5798000, 261000, 5537000, 19000),
    1: Answer(18749000, 6428000, 1246000, 11336000, 280000, 11056000, 19000),
    2: Answer(11350000, 7046000, 1068000, 3492000, 275000, 3217000, 19000),
    3: Answer(18853000, 8145000, 1240000, 9774000, 324000, 9450000, 18000),
    4: Answer(16589000, 8887000, 1126000, 6587000, 37000, 6550000, 26000),
    5: Answer(16392000, 9121000, 1041000, 6251000, 40000, 6211000, 19000),
    6: Answer(11410000, 7051000, 1051000, 3558000, 269000, 3289000, 19000),
    7: Answer(10967000, 8308000, 1059000, 1746000, 166000, 1580000, 20000),
}
NCCL_PARSER = {0: Answer(660551005, 503050991, 115655847, 46876493, 7317025, 39559468, 2284699)}
TRACE_FILTER = {
    0: Answer(1222847000, 675191000, 210320000, 396199000, 59216000, 336983000, 353000),
    1: Answer(1231186000, 651136000, 271973000, 379053000, 75530000, 303523000, 4554000),
}

DLRM_WAITS_US = {0: 5580, 1: 11125, 2: 3280, 3: 9571, 4: 6370, 5: 6041, 6: 3342, 7: 1534}
DLRM_LAST_TO_ARRIVE = [7, 7, 7, 7, 7, 5, 5, 4]

PARTS = ("compute", "exposed_total", "exposed_memory", "bubble", "idle", "data", "checkpoint", "gc", "other")


def imported(files: list[Path], run: Path, *options: str) -> dict[str, Any]:
    """What ``commtrace summary --json`` says after ``commtrace import kineto``."""
    runner = CliRunner()
    made = runner.invoke(app, ["import", "kineto", *map(str, files), "-o", str(run), *options])
    assert made.exit_code == 0, made.output
    result = runner.invoke(app, ["summary", str(run), "--json"])
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def hta(pattern: str) -> list[Path]:
    return sorted(reference_data("kineto", "hta").glob(pattern))


@pytest.mark.parametrize(
    ("files", "answers"),
    [
        (dlrm, DLRM),
        (lambda: hta("nccl_parser_config*"), NCCL_PARSER),
        (lambda: hta("trace_filter*"), TRACE_FILTER),
    ],
    ids=["dlrm", "nccl_parser_config", "trace_filter"],
)
def test_the_parts_are_exact_to_the_nanosecond(files: Any, answers: dict[int, Answer], tmp_path: Path) -> None:
    summary = imported(files(), tmp_path / "run")

    found = {
        rank["rank"]: Answer(
            span=rank["wall_ns"],
            idle=rank["idle_ns"],
            compute=rank["compute_ns"],
            communication=rank["exposed_total_ns"] + rank["bubble_ns"] + rank["hidden_ns"],
            overlap=rank["hidden_ns"],
            exposed=rank["exposed_total_ns"] + rank["bubble_ns"],
            exposed_memory=rank["exposed_memory_ns"],
        )
        for rank in summary["ranks"]
    }
    assert found == answers
    for rank in summary["ranks"]:
        assert sum(rank[f"{part}_ns"] for part in PARTS) == rank["wall_ns"]
        assert rank["other_ns"] == 0


def test_the_reference_trace_shows_which_rank_waited_for_which(tmp_path: Path) -> None:
    summary = imported(dlrm(), tmp_path / "run")

    waits = {rank["rank"]: rank["wait_ns"] for rank in summary["ranks"]}
    assert waits == pytest.approx({rank: wait * 1000 for rank, wait in DLRM_WAITS_US.items()}, abs=1000)
    assert sum(row["duration_ns"]["sum"] for row in summary["communication"]) == 48_542_000
    assert sum(row["wait_ns"] for row in summary["communication"]) == pytest.approx(46_843_000, abs=1000)
    assert all(row["unmatched"] == 0 for row in summary["communication"])
    assert "Others waited longest for rank 7" in in_json(summary, "not_judged")[0]["evidence"]


def test_the_reference_trace_shows_which_rank_came_last(tmp_path: Path) -> None:
    imported(dlrm(), tmp_path / "run")

    analysis = analyse(tmp_path / "run")

    for rank, trace in analysis.run.ranks.items():
        matches = analysis.matches.ranks[rank]
        assert matches.last_rank[trace.spans.group >= 0].tolist() == DLRM_LAST_TO_ARRIVE
    blame = blame_ns(analysis.run, analysis.matches)
    assert max(blame, key=lambda rank: blame[rank]) == 7, "rank 1 communicates most, and is the victim"
    assert sum(blame.values()) == pytest.approx(46_843_000, abs=1000)


def test_described_collectives_are_taken_at_their_word(tmp_path: Path) -> None:
    summary = imported(hta("nccl_parser_config*"), tmp_path / "run")

    assert summary["run"]["world_size"] == 2
    rows = {row["operation"]: row for row in summary["communication"]}
    assert {name: (row["role"], row["group_size"], row["count"]) for name, row in rows.items()} == {
        "all_reduce": ("world", 2, 15),
        "broadcast": ("world", 2, 6),
    }
    assert rows["all_reduce"]["bytes"] == 306_684_384


def test_profiler_steps(tmp_path: Path) -> None:
    summary = imported(hta("nccl_parser_config*"), tmp_path / "run", "--step-source", "profiler")

    assert summary["run"]["steps"]["left_out"] == [{"first": 4, "last": 4, "count": 1, "reason": "warm-up"}]
    (rank,) = summary["ranks"]
    assert sum(rank[f"{part}_ns"] for part in PARTS) == rank["wall_ns"]
