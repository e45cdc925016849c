"""A run that is repeated is one run with more steps."""

from __future__ import annotations

from pathlib import Path

from bench.repeat import repeat
from commtrace.analysis.summary import summarise
from commtrace.synth import Job, synthesize
from commtrace.synth.synthesis import write
from commtrace.trace.files.reader import load_run


def test_steps_follow_one_another(tmp_path: Path) -> None:
    write(synthesize(Job(tp=1, pp=2, dp=1, steps=4, jitter=0.0)), tmp_path / "short")
    repeat(load_run(tmp_path / "short"), 3, tmp_path / "long")
    short, long = summarise(tmp_path / "short"), summarise(tmp_path / "long")

    assert long.run.steps.used == tuple(range(1, 12))
    assert (long.problems, long.missing) == ((), 0)
    assert {kind: count / 11 for kind, count in long.coverage.captured.items()} == {
        kind: count / 3 for kind, count in short.coverage.captured.items()
    }
    assert long.pipeline is not None
    assert short.pipeline is not None
    assert long.pipeline.schedule == short.pipeline.schedule
