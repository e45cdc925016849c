"""A predicted run, opened as a recorded one, is the run that was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.pipeline.observed import find_pipeline
from commtrace.analysis.prediction.changes import Changes, LatencyChange
from commtrace.analysis.prediction.predict import predict
from commtrace.analysis.windows.run import OpenedRun
from commtrace.cli.commands.whatif import write_predicted
from commtrace.errors import ConfigurationError
from tests.pipeline_factory import PipelineJob

JOB = PipelineJob(
    stages=4, microbatches=8, data_parallel=2, transfer_ns=1_000, all_reduce_ns=50_000, optimizer_ns=300_000, steps=5
)


def written(directory: Path, **changes: Any) -> tuple[float, Analysis]:
    """Return the predicted step time, and the run that shows it."""
    outcome = predict(analyse(JOB.run()), Changes(**changes))
    write_predicted(outcome, directory)
    return outcome.prediction.predicted_ns, analyse(directory)


@pytest.mark.parametrize(
    ("changes", "schedule", "microbatches"),
    [
        ({"latency": (LatencyChange("pp", ns=50_000, is_added=True),)}, "1f1b", 8),
        ({"microbatches": 12}, "1f1b", 12),
        ({"schedule": "gpipe"}, "gpipe", 8),
        ({"schedule": "interleaved", "chunks": 2}, "interleaved_1f1b", 8),
        ({"schedule": "zero-bubble"}, "zb1p", 8),
    ],
)
def test_it_holds_the_predicted_step_and_schedule(
    changes: dict[str, Any], schedule: str, microbatches: int, tmp_path: Path
) -> None:
    step_ns, analysis = written(tmp_path / "predicted", **changes)
    pipeline = find_pipeline(OpenedRun.of(analysis))

    assert pipeline is not None
    assert (pipeline.schedule, pipeline.microbatches) == (schedule, microbatches)
    assert predict(analysis, Changes()).prediction.fidelity.measured_ns == step_ns
    assert all(stage.unmatched_ns == 0 for stage in pipeline.per_stage)


def test_all_instants_of_a_step_are_in_a_state(tmp_path: Path) -> None:
    _, analysis = written(tmp_path / "predicted", microbatches=12)
    partition = analysis.partition

    assert partition.total("other").sum() == 0


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = predict(analyse(JOB.run()), Changes())

    with pytest.raises(ConfigurationError, match="no empty directory"):
        write_predicted(outcome, tmp_path)
