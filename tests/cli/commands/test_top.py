"""What ``commtrace top`` prints: legible without colour, in any width, and never in the way."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.cli.commands.top import draw, pause_seconds
from commtrace.cli.main import app
from commtrace.live.top.frame import Frame, RankRow, choose_ranks
from commtrace.live.top.from_files import make_frame
from tests.e2e.launch import REPOSITORY
from tests.factory import EPOCH_NS
from tests.live.findings import hang_finding, slow_finding
from tests.live.top.made_frames import MS, newest, two_ranks
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import write_run

runner = CliRunner()


def drawn(frame: Frame, width: int = 100, **options: int) -> list[str]:
    return [line.plain.rstrip() for line in draw(frame, width, **options)]


def many(count: int) -> Frame:
    """Ranks of which the higher one computes longer; rank 3 is slow, rank 5 silent, all wait for rank 7."""
    rows = tuple(
        RankRow(
            rank=rank,
            step_ns=10 * MS,
            parts={"compute": 5 * MS + rank, "exposed": 5 * MS - rank},
            state="silent" if rank == 5 else "running",
            blame_ns=MS if rank == 7 else 0,
            age_ns=0,
        )
        for rank in range(count)
    )
    slow = slow_finding(3, cost_ns=2e6, share=0.2, evidence="It is slow.", since_ns=None)
    sources = {slow.id: "steps shown"}
    return Frame("run", EPOCH_NS, num_steps=1, ranks=rows, findings=(slow,), sources=sources)


def test_a_whole_frame() -> None:
    frame = make_frame(newest(two_ranks(), 1, 3), 2, EPOCH_NS + 30 * MS)
    lines = drawn(replace(frame, before_ns=8 * MS), 80)
    assert lines[0].startswith("made-run · 2 ranks on 1 host · ")
    assert lines[1:] == [
        "Not judged: Slow ranks were not looked for: too few steps: 2, at least 8 are",
        "  needed to separate a slow rank from noise.",
        "Step 2 · takes 10.0 ms, 8.00 ms over the run: +25.0%",
        "Shown: mean of 2 steps, 1–2",
        "",
        "exposed by role    mean ms  share     wait  transfer     most  on rank",
        "dp                    5.00    50%     2.00      3.00     7.00  0",
        "",
        "rank  step  compute  exposed  x dp  other  waits for  blamed  heard",
        "   0  10.0     2.00     7.00  7.00   1.00    1: 4.00       0    now  ██xxxxxxxx·",
        "   1  10.0     6.00     3.00  3.00   1.00       none    4.00    now  ███████xxx·",
        "ms per step; █ compute  x exposed  · other",
    ]
    bar = next(line for line in drawn(frame, 120) if line.startswith("   0"))
    assert bar.split("now  ")[1] == "████████" + "x" * 28 + "····"


def test_how_long_devices_waited_for_their_hosts_has_a_column_where_that_is_known() -> None:
    ranks = many(4).ranks
    known = tuple(replace(row, launch_bound_ns=MS if row.rank == 1 else 0) for row in ranks)
    heads = [
        next(line for line in drawn(replace(many(4), ranks=rows)) if "compute  " in line) for rows in (known, ranks)
    ]

    assert ["launch-bound" in head for head in heads] == [True, False]
    row = next(line for line in drawn(replace(many(4), ranks=known)) if line.startswith("   1"))
    assert row.split()[:4] == ["1", "10.0", "5.00", "1.00"]


def test_the_largest_losses_without_a_straggler_are_lines_with_what_to_do() -> None:
    frame = make_frame(newest(PipelineJob(2, 4, data_parallel=2, steps=12).run(), 1, 12), 11, EPOCH_NS)
    (said,) = [line for line in drawn(frame, 200) if line.startswith("Lost time, ")]

    assert said.startswith("Lost time, waiting for pipeline neighbours (bubble): ")
    assert said.endswith(" of it). More microbatches or chunks, or stages of equal length, make it smaller.")


def test_the_awaited_rank_is_named_after_enough_steps() -> None:
    told = "Waited for, of all waiting: rank 7 100%"
    assert [told in drawn(replace(many(8), num_steps=steps)) for steps in (7, 8)] == [False, True]


@pytest.mark.parametrize("width", [80, 100, 133, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    nodes = {rank: f"a-rather-long-name-of-host-{rank}" for rank in range(8)}
    job = PipelineJob(4, 4, data_parallel=2, steps=12, extra_forward_ns={1: MS}, nodes=nodes)
    frame = make_frame(newest(job.run(), 1, 12), 11, EPOCH_NS)
    for one in (frame, many(64)):
        assert max(map(len, drawn(one, width, height=40))) <= width


def test_a_frame_fits_on_the_terminal() -> None:
    for height in (24, 50):
        assert len(drawn(many(1024), 100, height=height)) <= height


def test_in_a_low_terminal_findings_are_short_so_that_ranks_have_room() -> None:
    told = "It needs longer in every step. " * 8
    slow = [slow_finding(rank, cost_ns=2e6, share=0.2, evidence=told, since_ns=None) for rank in (3, 5)]
    frame = replace(many(64), findings=tuple(slow), sources={one.id: "steps shown" for one in slow})
    screens = [drawn(frame, 80, height=height) for height in (50, 20, 16)]

    for lines, explained in zip(screens, (2, 1, 0), strict=True):
        assert sum("STRAGGLER" in line for line in lines) == 2
        assert " ".join(lines).count("It needs longer") == 8 * explained
        assert slow[0].advice in " ".join(line.strip() for line in lines)
        assert "   3" in {line[:4] for line in lines}


def test_a_job_that_makes_no_progress_is_not_told_how_to_run_faster() -> None:
    run = PipelineJob(2, 4, data_parallel=2, steps=12).run()
    frame = make_frame(newest(run, 1, 12), 11, EPOCH_NS)
    stopped = replace(frame, ranks=tuple(replace(row, state="stopped") for row in frame.ranks))
    hangs = replace(frame, findings=(hang_finding(), *frame.findings))

    assert any(line.startswith("Lost time") for line in drawn(frame, 80))
    for one in (stopped, hangs):
        assert not any(line.startswith(("Lost time", "No straggler")) for line in drawn(one, 80))


def test_of_many_ranks_only_outliers_are_shown_and_the_rest_is_counted() -> None:
    lines = drawn(many(64), 100, most_ranks=6)
    assert [row.rank for row in choose_ranks(many(64), 6)] == [0, 3, 5, 7, 62, 63]
    assert lines[-1] == "58 of 64 ranks hidden: compute 5.00–5.00 ms; --ranks N shows more"
    assert "SILENT" in next(line for line in lines if line.startswith("   5"))


def test_once_prints_a_frame_and_json_prints_it_as_json(tmp_path: Path) -> None:
    run = write_run(tmp_path, PipelineJob(2, 4, data_parallel=2, steps=12).run())
    shown = runner.invoke(app, ["top", str(run), "--once", "--last", "5"])
    assert shown.exit_code == 0, shown.output
    assert "mean of 5 steps, 7–11" in shown.output
    answer = json.loads(runner.invoke(app, ["top", str(run), "--json", "--last", "5"]).output)
    assert (answer["first_step"], answer["num_steps"], len(answer["ranks"])) == (7, 5, 4)


def test_a_run_that_is_not_there_yet_is_reported_and_ends_with_3(tmp_path: Path) -> None:
    shown = runner.invoke(app, ["top", str(tmp_path / "later"), "--once"])
    assert shown.exit_code == 3
    assert shown.output.startswith("Nothing to show yet: ")
    answer = runner.invoke(app, ["top", str(tmp_path / "later"), "--json"])
    assert (answer.exit_code, set(json.loads(answer.output))) == (3, {"source", "waiting"})


def test_an_address_without_anybody_is_an_error(tmp_path: Path) -> None:
    shown = runner.invoke(app, ["top", "http://127.0.0.1:9/metrics", "--once"])
    assert shown.exit_code == 2
    assert "does not answer" in shown.output


def test_top_waits_for_a_run_on_a_terminal_draws_it_and_ends_quietly(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "commtrace", "top", str(run), "--refresh", "0.2"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
        # What was started in the background of a script ignores it, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        os.close(theirs)
        assert "waiting for" in _read_until(ours, "waiting for")
        write_run(tmp_path / "beside", PipelineJob(2, 4, data_parallel=2, steps=12).run()).rename(run)
        assert "blamed" in _read_until(ours, "blamed")
        process.send_signal(signal.SIGINT)
        _read_until(ours, "\x1b[?1049l")  # back on the screen that was there before
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, b"")
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def _read_until(terminal: int, awaited: str, seconds: float = 60.0) -> str:
    seen, deadline = "", time.monotonic() + seconds
    while awaited not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    assert awaited in seen, seen[-3000:]
    return seen


@pytest.mark.parametrize(("took", "pause"), [(0.1, 2.0), (0.5, 2.0), (1.0, 4.0), (8.0, 32.0)])
def test_looking_takes_a_fifth_of_the_time_at_most(took: float, pause: float) -> None:
    assert pause_seconds(took, refresh=2.0) == pytest.approx(pause)
