"""``commtrace compare`` as a gate in CI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commtrace
from commtrace.cli.main import app
from tests.analysis.comparison.two_rank_jobs import job
from tests.json_schemas import errors
from tests.trace.rows import write_run

runner = CliRunner()


def test_a_slower_run_fails_and_says_by_how_much(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job(transfer=80))
    result = runner.invoke(app, ["compare", str(before), str(after)])
    assert result.exit_code == 1, result.output
    assert "Slower: the median step +28.6% " in result.output
    assert "over the threshold of 5%" in " ".join(result.output.split())
    assert "Versions, environment and layout are the same." in result.output


def test_a_threshold_lets_a_slower_run_pass(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job(transfer=80))
    result = runner.invoke(app, ["compare", str(before), str(after), "--threshold", "30"])
    assert result.exit_code == 0, result.output
    assert "within the threshold of 30%" in " ".join(result.output.split())


def test_an_equal_run_passes(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job())
    result = runner.invoke(app, ["compare", str(before), str(after)])
    assert result.exit_code == 0, result.output
    title = "Run made-run · cut off: ranks 0–1 · 2 ranks on node0 · 7 steps of 140 ns"
    assert " ".join(result.output.split()).startswith(f"Before: {title} (a) After: {title} (b) ")
    assert "No change beyond chance" in result.output


def test_further_runs_of_a_side_tell_what_differs_from_start_to_start(tmp_path: Path) -> None:
    """One pair alone calls +28.6% real; the runs of one side differ by as much."""
    runs = {name: write_run(tmp_path / name, job(transfer=time)) for name, time in (("a", 40), ("a2", 75), ("b", 80))}
    more = ["--before", str(runs["a2"])]

    alone = runner.invoke(app, ["compare", str(runs["a"]), str(runs["b"])])
    result = runner.invoke(app, ["compare", str(runs["a"]), str(runs["b"]), *more, "--details"])
    answer = json.loads(runner.invoke(app, ["compare", str(runs["a"]), str(runs["b"]), *more, "--json"]).stdout)

    assert (alone.exit_code, result.exit_code) == (1, 0)
    assert "record each side again with --before and --after" in " ".join(alone.output.split())
    output = " ".join(result.output.split())
    assert [output.count(side) for side in ("Before: Run", "After: Run")] == [2, 1]
    assert "Means over 2 and 1 runs" in output
    assert "No change beyond chance" in output
    assert answer["runs"] == {"before": 2, "after": 1}
    assert answer["wall_ns"]["before"] == 157.5


def test_no_run_counts_twice(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job())
    for again in (before, after):
        result = runner.invoke(app, ["compare", str(before), str(after), "--before", str(again)])
        assert result.exit_code == 2
        assert "are the same run" in result.output


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    """``compare runs/fast runs/latest`` must not pass because fast is the latest."""
    run = write_run(tmp_path / "runs" / "fast", job())
    result = runner.invoke(app, ["compare", str(run), str(tmp_path / "runs" / "latest")])
    assert result.exit_code == 2
    assert "are the same run" in result.output


def test_json_holds_what_the_tables_show(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job(compute=130))
    result = runner.invoke(app, ["compare", str(before), str(after), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert answer["wall_ns"]["before"] == 140.0
    assert answer["wall_ns"]["difference"] == 30.0
    assert answer["parts_ns"][0]["state"] == "compute"
    assert answer["verdict"].startswith("Slower")


def test_numbers_of_other_ranks_say_so_beside_them(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job())
    shutil.rmtree(after / "rank-00001")
    result = runner.invoke(app, ["compare", str(before), str(after)])
    output = " ".join(result.output.split())
    assert "before, 2 of 2 after, 1 of 2" in output
    differ = "Ranks recorded: 2 of 2 before, 1 of 2 after. Parts and bandwidths are not of the same ranks."
    assert output.index(differ) < output.index("before, 2 of 2 after, 1 of 2")
    answer = json.loads(runner.invoke(app, ["compare", str(before), str(after), "--json"]).stdout)
    assert answer["verdict"].endswith(differ)


def test_findings_of_both_sides_are_matched(tmp_path: Path) -> None:
    """The same job twice: rank 1 was slow, and now rank 3 is."""
    runs = [str(tmp_path / name) for name in ("before", "after")]
    for run, fault in zip(runs, ("slow-rank=1:1.5", "slow-rank=3:1.5"), strict=True):
        made = ["synth", "-o", run, "--dp", "4", "--num-steps", "20", "--fault", fault]
        assert runner.invoke(app, made).exit_code == 0

    lines = runner.invoke(app, ["compare", *runs]).output.splitlines()
    answer = json.loads(runner.invoke(app, ["compare", *runs, "--json"]).stdout)

    assert [line.partition(" · ")[0] for line in lines[:2]] == ["Before: Run before", "After: Run after"]
    assert lines[2].startswith("New: rank 3 on node0, compute: ")
    assert lines[3].startswith("Gone: rank 1 on node0, compute: ")
    assert list(errors("compare", answer)) == []
    changes = {one["id"]: one["change"] for one in answer["findings"]}
    assert (changes["slow/ranks/compute/3"], changes["slow/ranks/compute/1"]) == ("new", "gone")
    assert changes["lost/job/transfer"] == "same"


def test_a_run_with_too_few_steps_cannot_be_compared(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "a", job()), write_run(tmp_path / "b", job(steps=3))
    result = runner.invoke(app, ["compare", str(before), str(after)])
    assert result.exit_code == 3
    assert "Cannot be judged" in result.output


def test_a_run_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    before = write_run(tmp_path / "a", job())
    result = runner.invoke(app, ["compare", str(before), str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "nothing" in result.output


def test_a_library_and_a_setting_of_nccl_that_only_one_run_had_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs are recorded by the recorder itself; the second one has been tampered with, and has a secret."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    recorded(tmp_path / "usual")
    monkeypatch.setenv("LD_PRELOAD", "/home/me/libjemalloc.so.2")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_NET_PLUGIN_TOKEN", "s3cret")
    recorded(tmp_path / "other")
    runs = [str(tmp_path / "usual"), str(tmp_path / "other")]

    answer = json.loads(runner.invoke(app, ["compare", *runs, "--json"]).stdout)
    printed = runner.invoke(app, ["compare", *runs]).output

    assert answer["circumstances"] == [
        {"what": "LD_PRELOAD", "before": "–", "after": "libjemalloc.so.2"},
        {"what": "NCCL_P2P_DISABLE", "before": "–", "after": "1"},
    ]
    assert "LD_PRELOAD" in printed
    assert "libjemalloc.so.2" in printed
    assert "s3cret" not in printed


def recorded(directory: Path) -> None:
    commtrace.start(commtrace.Config(dir=str(directory)))
    for number in range(10):
        with commtrace.step(number):
            pass
    commtrace.stop()
