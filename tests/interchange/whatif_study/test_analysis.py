"""A real job of 8 GPUs whose what-if analysis was published: every number of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commtrace.analysis.replay.whatif import WhatIf
from commtrace.interchange.whatif_study.analysis import analyse_whatif_trace
from commtrace.interchange.whatif_study.files import import_whatif
from commtrace.interchange.whatif_study.trace import whatif_trace_of
from commtrace.trace.files.reader import load_run
from tests.reference import reference_data


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> WhatIf:
    path = tmp_path_factory.mktemp("whatif")
    trace, meta = (reference_data("whatif", name) for name in ("trace-ST.parquet", "meta-ST.yaml"))
    import_whatif(trace, path / "run", meta=meta)
    return analyse_whatif_trace(whatif_trace_of(load_run(path / "run")))


def published(name: str) -> Any:
    return json.loads(reference_data("whatif", name).read_text())


def test_the_slowdown_of_the_job(computed: WhatIf) -> None:
    result = published("result-ST.json")

    assert computed.slowdown == pytest.approx(result["blocking_slowdown"], rel=1e-5)
    assert computed.launch_slowdown == pytest.approx(result["launch_slowdown"], rel=1e-5)


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


def test_the_gain_of_fixing_slow_workers_or_the_last_stage_equals_the_published_one(computed: WhatIf) -> None:
    assert computed.slowest_workers_share == pytest.approx(published("mw-ST.json")["Mw"], rel=1e-4)
    assert computed.last_stage_share == pytest.approx(published("ms-ST.json")["Ms"], rel=1e-5)
