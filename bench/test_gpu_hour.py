"""The script of the GPU hour: rehearsed as a whole, and with stages that hang or fail."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench.engines import why_not_native
from bench.gpu_hour import NO_GPU, STAGES, Report, Stage, main, run_stages
from tests.e2e.launch import REPOSITORY, run
from tests.gpu.stages import QUESTIONS
from tests.gpu.stages.stage import ANSWERS, REHEARSED
from tests.gpu.table import FAILS

ANSWERING = f"""
import json, sys
from pathlib import Path

output = Path(sys.argv[1])
output.mkdir(parents=True)
row = {{"question": "dropped spans", "variant": "native", "verdict": "holds", "figures": "none of 9"}}
(output / "{ANSWERS}").write_text(json.dumps(row) + "\\n" + '{{"question": "half wri')
(output / "figures.json").write_text("[1]")
"""


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "hangs.py").write_text(ANSWERING + "import time\ntime.sleep(600)\n")
    (folder / "fails.py").write_text("raise RuntimeError('no such card')\n")
    (folder / "answers.py").write_text(ANSWERING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return [Stage("hangs", 6.0, "made_up"), Stage("fails", 20.0, "made_up"), Stage("answers", 20.0, "made_up")]


def test_a_stage_that_hangs_is_ended_and_keeps_what_it_found(stages: list[Stage], tmp_path: Path) -> None:
    output, files = tmp_path / "out", tmp_path / "files"
    files.mkdir()
    report = Report(output, files)

    assert not run_stages(stages, report, files, time.monotonic() + 60)

    table = (output / "table.md").read_text()
    assert table.count("| dropped spans | native | holds | none of 9 |") == 2
    assert table.count("not run: no stage answered it") == len(QUESTIONS) - 1
    log = [line.rpartition(",")[0] for line in table.splitlines() if line.startswith(("hangs", "fails", "answers"))]
    assert log == ["hangs: FAILS: no end after 6 s", "fails: FAILS: RuntimeError: no such card", "answers: ended well"]
    with tarfile.open(output / "gpu-hour.tar.gz") as archive:
        names = set(archive.getnames())
    assert {f"gpu-hour/{name}" for name in ("hangs/figures.json", "fails/output.txt", "table.md")} < names


def test_a_stage_for_which_no_time_is_left_is_named(stages: list[Stage], tmp_path: Path) -> None:
    report = Report(tmp_path / "out", tmp_path / "made_up")

    assert not run_stages(stages[2:], report, tmp_path, time.monotonic() + 5)

    assert "answers: not run, time was up" in report.table()


def test_every_stage_is_run() -> None:
    modules = {path.stem for path in (REPOSITORY / "tests" / "gpu" / "stages").glob("*.py")} - {"__init__", "stage"}

    assert {stage.name for stage in STAGES} == modules


def test_a_stage_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "engin"])

    assert "no stage is called engin; there are engine, graphs, call_costs" in capsys.readouterr().err


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "MAKEFLAGS": ""}
    arguments = [f"GPU_PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}"]
    completed = run(["make", "--no-print-directory", "gpu", *arguments], environment, 100)

    assert (completed.returncode, completed.stdout) == (0, f"{NO_GPU}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_whole_hour_can_be_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "bench/gpu_hour.py", "--rehearse", "--output", str(tmp_path), "--seconds", "560"]
    completed = run(command, {}, 580)

    assert completed.returncode == 0, completed.stdout[-8_000:]
    table = (tmp_path / "table.md").read_text()
    assert table in completed.stdout
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    answered = {row[0].removeprefix("| "): row[2] for row in rows if "not run" not in row[2]}
    only_on_gpu = {
        "cost of a call: all_gather_into_tensor", "cost of a call: reduce_scatter_tensor", "brackets against kernels",
        "barriers against kernels", "aborted group", "graph capture", "replays of graphs",
        "stamps against kernels",
    }  # fmt: skip
    assert set(QUESTIONS) - set(answered) <= only_on_gpu | {"both engines record the same"}
    # No figure of a machine without a GPU can be taken for one of a GPU.
    assert {verdict.partition(";")[0] for verdict in answered.values()} == {REHEARSED}
    if not why_not_native():
        assert "both engines record the same" in answered
        assert [row for row in rows if FAILS in row[2]] == []
    with tarfile.open(tmp_path / "gpu-hour.tar.gz") as archive:
        names = set(archive.getnames())
        member = archive.extractfile("gpu-hour/call_costs/figures.json")
        assert member is not None
        figures = json.load(member)
    assert {f"gpu-hour/{stage.name}/{ANSWERS}" for stage in STAGES} < names
    assert len(figures["costs"]["all_reduce"]["off"][0][0]) == 3
    assert (tmp_path / "gpu-hour.tar.gz").stat().st_size < 16 << 20  # what comes back from a lent machine
