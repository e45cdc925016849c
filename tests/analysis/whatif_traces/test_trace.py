"""A real job of 8 GPUs whose what-if analysis was published: every number of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commtrace.analysis.replay.whatif import WhatIf
from commtrace.analysis.whatif_traces.analysis import analyse_whatif_trace
from commtrace.analysis.whatif_traces.trace import read_sizes, read_whatif_trace
from commtrace.errors import TraceFormatError

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("REFERENCE_DATA", REPOSITORY.parent / "shared" / "data")) / "whatif"

needs_data = pytest.mark.skipif(
    not (DATA / "trace-ST.parquet").exists(),
    reason="no reference data: set REFERENCE_DATA to the folder that holds whatif/trace-ST.parquet",
)


@pytest.fixture(scope="module")
def computed() -> WhatIf:
    return analyse_whatif_trace(read_whatif_trace(DATA / "trace-ST.parquet", DATA / "meta-ST.yaml"))


def published(name: str) -> Any:
    return json.loads((DATA / name).read_text())


@needs_data
def test_the_slowdown_of_the_job(computed: WhatIf) -> None:
    result = published("result-ST.json")

    assert computed.slowdown == pytest.approx(result["blocking_slowdown"], rel=1e-5)
    assert computed.launch_slowdown == pytest.approx(result["launch_slowdown"], rel=1e-5)


@needs_data
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("by_step", "blocking_step_slowdown"),
        ("by_stage", "blocking_decompose_by_stage"),
        ("by_dp_rank", "blocking_decompose_by_dp_rank"),
        ("by_operation", "blocking_decompose_by_optype"),
    ],
)
def test_the_slowdown_by(computed: WhatIf, ours: str, theirs: str) -> None:
    slices = {str(key): value for key, value in getattr(computed, ours).items()}

    assert slices == pytest.approx(published("result-ST.json")[theirs], rel=1e-5)


@needs_data
def test_what_fixing_the_slowest_workers_and_the_last_stage_recovers(computed: WhatIf) -> None:
    assert computed.slowest_workers_share == pytest.approx(published("mw-ST.json")["Mw"], rel=1e-4)
    assert computed.last_stage_share == pytest.approx(published("ms-ST.json")["Ms"], rel=1e-5)


def test_the_sizes_of_a_job(tmp_path: Path) -> None:
    file = tmp_path / "meta.yaml"
    file.write_text("trial_name: ST\ndp_size: 2\n\npp_size: 4\n# a comment\n")

    assert read_sizes(file) == {"dp_size": 2, "pp_size": 4}


def test_a_table_that_is_no_such_trace(tmp_path: Path) -> None:
    pq.write_table(pa.table({"rank": [0], "step": [1]}), tmp_path / "trace.parquet")

    with pytest.raises(TraceFormatError, match="has no columns dp_rank, duration"):
        read_whatif_trace(tmp_path / "trace.parquet", tmp_path / "meta.yaml")


def test_steps_that_differ_in_their_operations(tmp_path: Path) -> None:
    columns = dict.fromkeys(("dp_rank", "stage", "rank", "seq_id", "mc", "gmc"), np.zeros(3, np.int64))
    table = pa.table(
        {
            **columns,
            "step": [0, 1, 1],
            "optype": ["optimizer", "optimizer", "gc"],
            "start_ts": [0.0, 0.0, 1.0],
            "duration": [1.0, 1.0, 1.0],
        }
    )
    pq.write_table(table, tmp_path / "trace.parquet")
    (tmp_path / "meta.yaml").write_text("dp_size: 1\n")

    with pytest.raises(TraceFormatError, match="the operations differ between steps"):
        read_whatif_trace(tmp_path / "trace.parquet", tmp_path / "meta.yaml")
