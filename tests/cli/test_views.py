"""What several commands print: the basis of numbers, the wall time, the critical path, losses."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from commtrace.analysis.breakdown.critical_path import CriticalPath, Share
from commtrace.analysis.judged_run import RunTitle
from commtrace.analysis.memory import RankMemory
from commtrace.analysis.stragglers.lost_time import LostTime
from commtrace.analysis.timeline import step_durations
from commtrace.analysis.windows.run import open_run
from commtrace.cli.head import print_head, when
from commtrace.cli.main import app
from commtrace.cli.views import critical_path_lines, lost_time_lines, memory_lines, together_line
from commtrace.findings.finding import NOTHING_COSTS, Finding, Occurrence, Stretch, not_judged, ranked
from commtrace.findings.formatting import format_time
from tests.findings.reading import in_json, slow
from tests.pipeline_factory import Clock, PipelineJob
from tests.trace.rows import write_run

runner = CliRunner()
COMMANDS = ("straggler", "pipeline", "bandwidth")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    job = PipelineJob(2, 4, nodes={0: "a", 1: "b"}, clocks={"b": Clock(10**9, 30.0)}, steps=10)
    return write_run(tmp_path / "run", job.run())


def words(*arguments: str | Path) -> str:
    return " ".join(runner.invoke(app, [str(one) for one in arguments]).output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_how_well_clocks_agree_is_a_detail(recorded: Path, command: str) -> None:
    assert "Clocks: collective ends, 10 observations, residual" in words(command, recorded, "--details")
    assert "residual" not in words(command, recorded)
    answer = json.loads(words(command, recorded, "--json"))
    assert answer["alignment"]["residual_ns"]["p99"] < 20_000
    assert answer["problems"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_rank_without_files_is_reported(tmp_path: Path, command: str) -> None:
    directory = write_run(tmp_path, PipelineJob(2, 4, data_parallel=2, steps=10).run())
    shutil.rmtree(directory / "rank-00003")
    assert "! 1 of 4 ranks have no readable files: 3." in words(command, directory)
    problems = json.loads(words(command, directory, "--json"))["problems"]
    assert [problem for problem in problems if "no readable files: 3" in problem]


def test_compare_tells_it_of_either_side(recorded: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", PipelineJob(2, 4, nodes={0: "a", 1: "b"}, steps=10).run())
    shown = words("compare", recorded, other, "--details")
    assert f"{recorded}: Clocks: collective ends" in shown
    assert f"{other}: Clocks: collective ends" in shown
    answer = json.loads(words("compare", recorded, other, "--json"))
    assert [side[0]["alignment"]["method"] for side in answer["basis"].values()] == ["collective ends"] * 2


def test_export_tells_how_well_the_clocks_agree(recorded: Path, tmp_path: Path) -> None:
    assert "note: the hosts' clocks agree to" in words("export", recorded, "-o", tmp_path / "trace")


@pytest.mark.parametrize("jump_ms", [-600, -300, -190])
def test_a_clock_that_is_stepped_back_by_about_a_step_costs_that_step_at_most(tmp_path: Path, jump_ms: int) -> None:
    """Steps of 183 ms: what was read in the step of the jump may be of either side of it."""
    options = "--pp 4 --dp 4 --num-steps 12 --gpus-per-host 4 --clock-offset 3 --clock-drift 5 --fault slow-rank=3:1.3"
    words("synth", "-o", tmp_path / "run", *options.split(), "--clock-step", f"1={jump_ms}@1")
    answer = json.loads(words("summary", tmp_path / "run", "--json"))
    assert answer["run"]["steps"]["count"] >= 10
    assert [one["ranks"] for one in in_json(answer)] == [[3]]
    assert answer["alignment"]["residual_ns"]["p99"] < 20_000


def share(rank: int, kind: str, ns: int, role: str = "", uncertain_ns: int = 0) -> Share:
    return Share(rank, kind, role, ns, uncertain_ns)


def line(*shares: Share) -> str:
    (text,) = critical_path_lines(CriticalPath(num_steps=2, shares=shares))
    return text


def test_ranks_come_with_their_work_and_communication_by_role() -> None:
    assert (
        line(
            share(3, "backward", 40_000_000),
            share(3, "forward", 21_000_000),
            share(1, "transfer", 8_000_000, "dp"),
            share(2, "transfer", 4_000_000, "dp"),
            share(0, "forward", 25_000_000),
            share(3, "unknown", 2_000_000, "tp", uncertain_ns=2_000_000),
        )
        == "Critical path (50.0 ms a step): rank 3 61% (backward 40%, forward 21%), rank 0 25% (forward 25%), "
        "dp transfer 12%, tp unknown 2%; 2% not resolved by clocks and starts"
    )


def test_ranks_that_have_little_are_told_together() -> None:
    shares = [share(rank, "forward", 4) for rank in range(25)]

    assert line(*shares).endswith(": 25 ranks 100% (forward 100%)")
    assert line(*shares, share(25, "input", 100)).endswith("rank 25 50% (input 50%), 25 other ranks 50% (forward 50%)")


def test_nothing_is_shown_where_it_is_not_known() -> None:
    assert not [*critical_path_lines(None)]


HOUR = 3_600_000_000_000
LOST = LostTime(
    num_steps=10, gpus=None, steps_ns=2 * HOUR, ideal_ns=HOUR, stragglers_ns=HOUR // 2, imbalance_ns=HOUR // 500,
    exposed_communication_ns=HOUR // 4, bubble_ns=0, input_ns=HOUR // 4, rest_ns=-HOUR // 500,
)  # fmt: skip


def test_it_is_one_line_that_adds_up() -> None:
    assert [*lost_time_lines(LOST)] == [
        "Lost: 50% of 2.0 h in steps: stragglers 25% (30 min), imbalance <1%, exposed communication 12% (15 min), "
        "input 12% (15 min); ideal 50%"
    ]


def test_the_loss_of_a_job_on_gpus_is_in_gpu_hours() -> None:
    (line,) = lost_time_lines(replace(LOST, gpus=64))

    assert line.startswith("Lost: 50% of 128 GPU-hours in steps: stragglers 25% (32 GPU-hours)")


def test_nothing_is_shown_for_steps_that_were_not_replayed() -> None:
    assert not [*lost_time_lines(None)]


def test_the_peak_memory_is_that_of_the_fullest_rank() -> None:
    peaks = [RankMemory(rank, 0, held << 30, (held + 2) << 30, 1) for rank, held in ((0, 40), (1, 44), (2, 20))]

    assert list(memory_lines(peaks)) == [
        "Peak memory: 44.0 GiB of tensors on rank 1, for which 46.0 GiB were reserved; 40.0 GiB on the median rank"
    ]
    assert list(memory_lines(peaks[2:])) == [
        "Peak memory: 20.0 GiB of tensors on rank 2, for which 22.0 GiB were reserved"
    ]
    assert list(memory_lines([])) == []


TITLE = RunTitle("made", 0, "ended", 4, 4, ("a",), "made", 10, 25e6)


def head(*findings: Finding, width: int = 80, details: bool = False) -> str:
    output = io.StringIO()
    print_head(Console(file=output, width=width, highlight=False), TITLE, ranked(findings), details=details)
    return output.getvalue()


def loss(cause: str, cost_ms: float, **changes: Any) -> Finding:
    one = Finding(id=f"lost/job/{cause}", kind="lost", place="job", cause=cause, cost_ns=cost_ms * 1e6)
    return structs.replace(one, share=cost_ms / 25, **changes)


def test_the_head_is_the_state_the_findings_by_cost_and_what_to_do() -> None:
    rank = slow(5.0, since_first_compared=True, share=0.2, advice="Look at it.")
    assert head(rank, loss("transfer", 9, evidence="By role: dp 100%.", advice="Overlap it.")) == (
        "Run made · ended · 4 ranks on a · 10 steps of 25.0 ms\n"
        "1. exposed communication: 9 ms per step (36.0% of it)\n"
        "   By role: dp 100%.\n"
        f"2. {rank.line()}\n"
        "   Since the first step that was compared.\n"
        "→ 1. Overlap it.\n"
        "→ 2. Look at it.\n"
        "\n"
    )


def test_of_many_findings_the_costliest_five_are_shown() -> None:
    many = [slow(cost, rank=rank) for rank, cost in enumerate(range(7))]
    assert "5. " in head(*many)
    assert "6. " not in head(*many)
    assert "2 more: --details" in head(*many)
    assert "7. " in head(*many, details=True)


def test_nothing_is_said_to_be_found_only_where_all_could_be_judged() -> None:
    why_not = not_judged("job", "Too few steps.")
    assert NOTHING_COSTS in head(loss("data", 0.1))
    assert "Not judged: Too few steps." in head(why_not)
    assert NOTHING_COSTS not in head(why_not)


def test_a_command_that_is_to_be_copied_is_not_broken() -> None:
    path = "commtrace-runs/" + "a-long-name/" * 10
    hang = Finding(
        id="hang", kind="hang", who="rank 1", evidence="Rank 1 has not arrived.",
        advice=f"See where each rank is: commtrace doctor {path}",
    )  # fmt: skip
    text = head(hang, loss("transfer", 9))
    assert "Rank 1 has not arrived." in text.splitlines()[1]
    assert f"  commtrace doctor {path}" in text.splitlines()
    assert "exposed communication" not in text, "of a job that does not go on it is no matter"
    assert "exposed communication" in head(hang, loss("transfer", 9), details=True)


def test_a_cause_of_few_steps_is_shown_with_its_first_step_and_no_range() -> None:
    rare = slow(
        3.0, "evaluation", occurrence=Occurrence((10, 20), 60_000_000, 20), since_step=10, since_ns=10**18,
        stretches=(Stretch(9, 20, 3.3e6),),
    )  # fmt: skip

    assert when(rare).startswith("First in step 10, which began at 2001-09-09")
    assert when(structs.replace(rare, occurrence=None)) == "In steps 9–20 (3.3 ms of each)."


@pytest.mark.parametrize(("is_bound", "words"), [(False, "3.30 ms"), (True, "at least 3.30 ms")])
def test_the_cost_of_several_is_that_of_all_together(is_bound: bool, words: str) -> None:
    one = slow(3.0, "gc")

    assert together_line([one, structs.replace(one, cost_is_bound=is_bound)], 3.3e6) == (
        f"Together they cost {words} per step."
    )


def test_every_command_says_the_same_length_of_a_step(tmp_path: Path) -> None:
    """Five of the steps take longer, so that mean and median differ."""
    run, other = tmp_path / "runs" / "run", tmp_path / "runs" / "other"
    for path in (run, other):
        words("synth", "-o", path, "--pp", "2", "--dp", "2", "--num-steps", "24", "--fault", "slow-rank=1:2@10:15")
    answer = json.loads(words("summary", run, "--json"))
    step_ns = sum(rank["wall_ns"] for rank in answer["ranks"]) / len(answer["ranks"])
    said = f"23 steps of {format_time(step_ns)}"

    for command in ("summary", "straggler", "bandwidth", "pipeline"):
        assert words(command, run).startswith(f"Run run · ended · 4 ranks on node0 · {said} ")
    assert words("compare", run, other).count(said) == 2
    assert words("list", run.parent).count(format_time(step_ns)) == 2
    assert answer["critical_path"]["ns"] / 23 == pytest.approx(step_ns, rel=0.001)
    lengths = step_durations(open_run(run).aligned, range(1, 24))
    assert sum(lengths.values()) / 23 == pytest.approx(step_ns, rel=1e-6)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 16 ranks with a slow rank, and a network that is slow in some steps."""
    run = tmp_path_factory.mktemp("runs") / "gpt"
    job = "--tp 2 --pp 2 --dp 4 --num-steps 24 --gpus-per-host 8 --fault slow-rank=5:1.3 --fault slow-link=2:3@10:15"
    words("synth", "-o", run, *job.split())
    return run


@pytest.mark.parametrize(
    "command",
    [
        "summary", "straggler", "straggler --details", "bandwidth", "bandwidth --by size", "bandwidth --by group",
        "pipeline", "pipeline --details", "doctor", "whatif --without-slow-rank all", "list", "hosts",
    ],
)  # fmt: skip
def test_eighty_columns_hold_what_a_command_prints(command: str, two_hosts: Path) -> None:
    name, *options = command.split()
    result = runner.invoke(app, [name, str(two_hosts.parent if name in ("list", "hosts") else two_hosts), *options])

    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if len(line) > 80 and str(two_hosts) not in line] == []


@pytest.mark.parametrize("command", ["summary", "straggler", "bandwidth", "pipeline"])
def test_every_command_has_the_same_findings_on_its_first_screen(command: str, two_hosts: Path) -> None:
    lines = runner.invoke(app, [command, str(two_hosts)]).output.splitlines()[:24]
    first = runner.invoke(app, ["summary", str(two_hosts)]).output.splitlines()[:24]

    end = lines.index("")
    assert lines[:end] == first[:end]
    assert "rank 5 on node0, compute: " in " ".join(lines)
    assert end < 15


def test_the_path_says_why_it_is_not_as_long_as_the_mean_step() -> None:
    path = CriticalPath(num_steps=2, shares=(share(3, "backward", 200_000_000),))

    assert len([*critical_path_lines(path, 100_500_000)]) == 1
    _, why = critical_path_lines(path, 80_000_000)
    assert why == (
        "It leads from the end of the last rank to that of the step before; the mean over the ranks is 80.0 ms, as not "
        "all of them end a step with the last one."
    )
