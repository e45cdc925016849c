"""``commtrace trigger`` on the files of a job whose rank does not answer."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from commtrace.cli.main import app
from commtrace.trace.files.writer import SegmentWriter
from tests.json_schemas import errors
from tests.trace.rows import metadata, steps


def test_a_rank_that_does_not_confirm_is_listed_and_the_exit_code_is_3(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, metadata(rank=0), steps_per_segment=100)
    writer.write(steps(0, 4))
    command = ["trigger", str(tmp_path), "--num-steps", "2", "--after", "10", "--wait", "0"]

    printed = CliRunner().invoke(app, [*command, "--json"])
    shown = CliRunner().invoke(app, command)
    writer.close()

    report = json.loads(printed.stdout)
    assert (printed.exit_code, shown.exit_code) == (3, 3)
    assert list(errors("trigger", report)) == []
    assert (report["first"] - report["latest_step"], report["end"] - report["first"]) == (10, 2)
    assert (report["seen_by"], report["not_seen_by"]) == ([], [0])
    assert "Not confirmed within 0 s by 1 ranks (0)" in shown.output
