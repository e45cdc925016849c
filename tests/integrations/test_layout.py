"""The layout that the user tells: places, roles of groups, and a layout of another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commtrace.config import Config
from commtrace.errors import ConfigurationError
from commtrace.integrations.layout import place_in
from commtrace.trace.files.reader import load_run
from tests.e2e.launch import REPOSITORY, fork

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "handmade_pipeline.py"


def test_the_first_dimension_is_that_of_neighbouring_ranks() -> None:
    sizes = Config(layout="tp=2, pp=4,dp=2").layout_sizes

    assert [*sizes.items()] == [("tp", 2), ("pp", 4), ("dp", 2)]
    assert [place_in(sizes, rank) for rank in (0, 1, 2, 8)] == [
        {"tp": 0, "pp": 0, "dp": 0},
        {"tp": 1, "pp": 0, "dp": 0},
        {"tp": 0, "pp": 1, "dp": 0},
        {"tp": 0, "pp": 0, "dp": 1},
    ]


@pytest.mark.parametrize("text", ["pp", "pp=0", "pp=2,pp=2", "pp=2;dp=2", "=2", "pp=-1"])
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="sizes of the parallel dimensions"):
        Config(layout=text)


@pytest.mark.e2e
@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", ["pp=2,dp=2", "pp=4,dp=2"])
def test_a_job_records_the_layout_that_fits_it(layout: str, tmp_path: Path) -> None:
    environment = {
        "COMMTRACE_DIR": str(tmp_path / "run"), "COMMTRACE_LAYOUT": layout, "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    options = json.dumps({"pp": 2, "dp": 2, "steps": 3, "work": 0.001, "records": True})
    completed = fork([PROGRAM, options], 4, environment, timeout=120)
    assert completed.returncode == 0, completed.stdout

    ranks = load_run(tmp_path / "run").ranks
    if layout == "pp=4,dp=2":
        assert "COMMTRACE_LAYOUT=pp=4,dp=2 is of 8 ranks, but the job has 4: it is ignored" in completed.stdout
        assert {str(trace.coordinates) for trace in ranks.values()} == {"{}"}
        return
    assert [dict(ranks[rank].coordinates) for rank in range(4)] == [
        {"pp": pp, "dp": dp} for dp in range(2) for pp in range(2)
    ]
    assert dict(ranks[0].parallel) == {"pp": 2, "dp": 2}
    assert {group.role for group in ranks[0].groups.values() if group.ranks == (0, 2)} == {"dp"}
