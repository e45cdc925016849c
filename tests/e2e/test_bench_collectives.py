"""``commtrace bench collectives`` in real processes of gloo: two emulated nodes, a user who stops it, a dead rank."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commtrace.analysis.communication.baseline import read_baseline
from commtrace.benchmarks.operations import OPERATIONS
from commtrace.cli.main import app
from tests.e2e.launch import Starter, fork, launch
from tests.json_schemas import errors

pytestmark = pytest.mark.e2e

COMMAND = ["tests/e2e/programs/commtrace_command.py", "bench", "collectives"]
fork_command = functools.partial(fork, imports=["commtrace.cli.commands.bench_collectives"])
ENDLESS = [
    "--operations",
    "all_reduce,broadcast",
    "--min-bytes",
    "64K",
    "--max-bytes",
    "64K",
    "--iterations",
    "9999999",
]


def test_every_operation_on_two_nodes_and_within_them(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    sizes = ["--min-bytes", "30000", "--max-bytes", "64KiB", "--warmup", "1", "--iterations", "2"]
    groups = ["--group", "world", "--group", "node", "--group", "across"]
    outputs = ["-o", str(path), "--plot", str(tmp_path / "bandwidth.svg"), "--json"]
    job = fork_command([*COMMAND, *sizes, *groups, *outputs], 4, {"RANKS_PER_NODE": "2"})
    assert job.returncode == 0, job.stdout
    told = json.loads(re.findall(r"^\{.*\}$", job.stdout, re.MULTILINE)[0])

    assert list(errors("bench-collectives", told)) == []
    found = read_baseline(path).measurements
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3)]
    expected = {(name, ranks) for name in OPERATIONS for ranks in [(0, 1, 2, 3), *pairs] if name != "send"}
    expected |= {("send", ranks) for ranks in [(0, 3), *pairs]}
    assert {(one.operation, one.ranks) for one in found} == expected
    assert {one.num_bytes for one in found} == {30_000, 60_000}
    assert {one.iterations for one in found} == {2}
    assert {one.nodes for one in found if one.ranks == (2, 3)} == {("node1",)}
    assert {one.nodes for one in found if one.ranks == (1, 3)} == {("node0", "node1")}
    assert told["made"]["backend"] == "gloo"
    assert (tmp_path / "bandwidth.svg").read_text().count("all_to_all") >= 1


def test_shares_of_an_expected_rate_and_tables_of_groups_that_are_measured_together() -> None:
    words = ["--operations", "all_reduce", "--min-bytes", "64K", "--max-bytes", "128K", "--iterations", "3"]
    expected = ["--expect", "1MB/s", "--expect", "pairs=1TB/s"]
    command = [*COMMAND, *words, "--group", "node", "--group", "pairs", *expected]
    text, answer = (fork_command([*command, *more], 4, {"RANKS_PER_NODE": "2"}) for more in ([], ["--json"]))
    told = json.loads(re.findall(r"^\{.*\}$", answer.stdout, re.MULTILINE)[0])

    assert (text.returncode, answer.returncode) == (1, 1)
    assert list(errors("bench-collectives", told)) == []
    assert next(iter(told)) == "verdict"
    low = r"all_reduce on ranks 0–3 of node0 and node1 reaches only .* of the 2.00 TB/s that 1TB/s per rank allow\."
    assert re.match(low, told["verdict"])
    assert told["verdict"].endswith("Expect 75 to 95%: measure larger tensors first, with --max-bytes 1G.")
    assert not told["reached"]
    assert [(one["group"], one["ranks"]) for one in told["shares"]] == [
        ("node", [0, 1]),
        ("node", [2, 3]),
        ("pairs", [0, 1, 2, 3]),
    ]
    assert re.findall("^all_reduce in group .*", text.stdout, re.MULTILINE) == [
        "all_reduce in group node: ranks 0–1 of node0, float32",
        "all_reduce in group node: ranks 2–3 of node1, float32",
        "all_reduce in group pairs: ranks 0–3 of node0 and node1, float32",
    ]


def test_a_rate_that_is_reached() -> None:
    words = ["--operations", "send", "--min-bytes", "64K", "--max-bytes", "64K", "--iterations", "3"]
    job = fork_command([*COMMAND, *words, "--expect", "world=1MB/s"], 2)

    assert job.returncode == 0, job.stdout
    said = r"send on ranks 0–1 of \S+ reaches \S+ MB/s at 64.0 KiB, \d+% of the 1.00 MB/s that 1MB/s per rank allow\."
    assert re.search(said, " ".join(job.stdout.split()))


def test_a_user_who_stops_it_gets_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    job = fork_command([*COMMAND, *ENDLESS, "-o", str(path)], 2, {"FAULT": "SIGINT@12"})

    assert "Stopped early. Highest busbw: " in job.stdout
    (one,) = read_baseline(path).measurements
    assert (one.operation, one.ranks, one.num_bytes) == ("all_reduce", (0, 1), 1 << 16)
    # Five are the warm-up. A thread takes the signal, perhaps some rounds later; then the next agreement stops both.
    assert 12 - 5 <= one.iterations < 1000


def test_measurements_from_before_a_rank_died_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    words = ["--operations", "broadcast,all_reduce", "--min-bytes", "64K", "--max-bytes", "64KiB"]
    job = fork_command([*COMMAND, *words, "-o", str(path), "--timeout", "20"], 2, {"FAULT": "SIGKILL@30"})

    assert job.returncode == 1
    assert not job.timed_out, job.stdout
    assert [one.operation for one in read_baseline(path).measurements] == ["broadcast"]


@pytest.mark.parametrize(
    "start", [fork_command, pytest.param(launch, marks=pytest.mark.thorough)], ids=["fork", "launch"]
)
def test_a_job_too_small_for_its_groups_is_reported_once(start: Starter) -> None:
    job = start([*COMMAND, "--group", "pairs"], 2)

    assert job.stdout.count("commtrace: --group pairs needs at least two nodes, and the job has 2 ranks on 1 node") == 1
    assert "bench_collectives.py" not in job.stdout  # no traceback of ours; torchrun prints its own
    assert re.findall(r"exitcode *: (\d+)|rank \d ended with (\d)", job.stdout)[0] in [("2", ""), ("", "2")]
    assert job.returncode == 1


def test_a_folder_that_is_missing_is_reported_once_before_anything_is_measured(tmp_path: Path) -> None:
    job = fork_command([*COMMAND, *ENDLESS, "-o", str(tmp_path / "gone" / "baseline.json")], 2)

    assert job.stdout.count(f"the folder {tmp_path}/gone does not exist; make it first") == 1
    assert "Traceback" not in job.stdout
    assert job.returncode == 1


def test_without_a_launcher_it_says_how_to_start_it() -> None:
    result = CliRunner(env={"RANK": None, "WORLD_SIZE": None}).invoke(app, ["bench", "collectives"])

    assert result.exit_code == 2
    assert "torchrun --nproc-per-node 8 -m commtrace bench" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--operations", "all_reduce,all"], "--operations all: write some of all_reduce"),
        (["--min-bytes", "0"], "--min-bytes 0: write a size"),
        (["--expect", "400G"], "--expect 400G: write a rate, such as 400Gbit/s or 50GB/s, or that of a group"),
        (["--expect", "node=450GB/s"], "--expect node=450GB/s: this group is not measured; add --group node"),
        (["--max-bytes", "4X"], "--max-bytes 4X: write a size, such as 32768, 32K, 4MiB or 1GB"),
    ],
)
def test_impossible_measurements_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "collectives", *words])

    assert result.exit_code == 2
    assert said in result.stderr
