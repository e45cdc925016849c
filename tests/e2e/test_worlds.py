"""Jobs of several worlds: all of their processes are kept, groups that join them are known, a hang names who hangs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from commtrace.capture.engine import choose
from commtrace.cli.commands.doctor import HEALTHY
from commtrace.cli.main import app
from commtrace.config import Config
from commtrace.trace import schema
from commtrace.trace.bounds import OUTSIDE
from commtrace.trace.files.reader import load_run
from commtrace.trace.metadata import Group
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, Completed, fork, run

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "worlds.py"
ITERATIONS = 6
ENGINES = [engine for engine in ("native", "python") if engine == "python" or choose(Config()).name == "native"]


def job(directory: Path, what: str, engine: str = "", **environment: str) -> Completed:
    """Both worlds under one Slurm job, without a name of their own."""
    where = {"COMMTRACE_DIR": f"{directory}/{{run_id}}", "SLURM_JOB_ID": "4711", "COMMTRACE_ENGINE": engine or "auto"}
    return fork([PROGRAM, what], nproc=4, env={**where, **environment}, timeout=150)


class Worlds(NamedTuple):
    trainer: Run
    rollout: Run

    def group(self, name: str) -> tuple[Group, Group]:
        """A group that joins both, as each of them has recorded it."""
        of_trainer, of_rollout = [
            next(group for trace in world.ranks.values() for group in trace.groups.values() if group.name == name)
            for world in self
        ]
        return of_trainer, of_rollout


def worlds_below(directory: Path) -> list[Run]:
    return [load_run(path) for path in sorted(directory.iterdir()) if path.is_dir() and not path.is_symlink()]


def told_apart(runs: list[Run], group: str) -> Worlds:
    """Which of them is which: a group that joins them begins with trainers."""
    first = {
        member.world
        for world in runs
        for trace in world.ranks.values()
        for known in trace.groups.values()
        if known.name == group and (member := known.members[0]) is not None
    }
    trainer = next(world for world in runs if world.any_metadata.world in first)
    (rollout,) = [world for world in runs if world is not trainer]
    return Worlds(trainer, rollout)


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*words], env={"COLUMNS": "200"})
    return result.exit_code, result.output


class Recorded(NamedTuple):
    directory: Path
    completed: Completed


def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, what: str) -> Recorded:
    """Run a job with the engine of the request."""
    directory = tmp_path_factory.mktemp(what)
    return Recorded(directory, job(directory, what, request.param))


def ended_well(recorded: Recorded) -> Path:
    assert recorded.completed.stdout.count("has ended well") == 4, recorded.completed.stdout
    return recorded.directory


@pytest.fixture(scope="module", params=ENGINES)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ended_well(recorded(request, tmp_path_factory, "weights"))


@pytest.fixture(scope="module", params=ENGINES)
def by_hand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ended_well(recorded(request, tmp_path_factory, "by_hand"))


@pytest.fixture(scope="module", params=ENGINES)
def hangs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, completed = recorded(request, tmp_path_factory, "hangs")
    assert "has ended well" not in completed.stdout
    assert not completed.timed_out, completed.stdout
    return directory


def test_all_processes_of_both_worlds_are_kept_under_one_slurm_job(weights: Path) -> None:
    runs = worlds_below(weights)

    assert [world.path.name for world in runs] == ["slurm-4711", "slurm-4711-world-2"]
    assert [list(world.ranks) for world in runs] == [[0, 1], [0, 1]]
    assert [world.problems for world in runs] == [(), ()]
    assert len({trace.metadata.pid for world in runs for trace in world.ranks.values()}) == 4
    for world in runs:
        assert {trace.metadata.job for trace in world.ranks.values()} == {"slurm-4711"}
        assert sorted(trace.metadata.local_rank for trace in world.ranks.values()) == [0, 1]
    keys = [{trace.metadata.world for trace in world.ranks.values()} for world in runs]
    assert [len(key) for key in keys] == [1, 1]
    assert keys[0] != keys[1]


def test_a_group_has_the_world_in_which_it_was_made(weights: Path) -> None:
    runs = worlds_below(weights)
    default = [next(group for group in world.ranks[0].groups.values() if group.ranks == (0, 1)) for world in runs]

    assert default[0].id == default[1].id  # which says nothing: the worlds do
    assert [group.world for group in default] == [world.any_metadata.world for world in runs]


def test_the_members_of_a_group_over_worlds_know_each_other(weights: Path) -> None:
    worlds = told_apart(worlds_below(weights), "weights")
    ours, theirs = worlds.group("weights")
    processes = [(worlds.trainer, 0), (worlds.rollout, 0), (worlds.rollout, 1)]

    for group in (ours, theirs):
        assert (group.ranks, group.size, group.is_over_worlds) == ((), 3, True)
        assert [member and (member.world, member.rank, member.pid) for member in group.members] == [
            (world.any_metadata.world, rank, world.ranks[rank].metadata.pid) for world, rank in processes
        ]
    assert ours.key == theirs.key != ""


def test_every_communication_over_worlds_is_recorded_on_all_its_members(weights: Path) -> None:
    worlds = told_apart(worlds_below(weights), "weights")
    for world, group, members in zip(worlds, worlds.group("weights"), ([0], [0, 1]), strict=True):
        for rank in members:
            spans = world.ranks[rank].spans
            rows = (spans.group == group.id) & (spans.kind == schema.COLLECTIVE)
            assert spans.seq[rows].tolist() == list(range(ITERATIONS))
            # The root is rank 0 of the trainers: a rank of their world, and a member of another one elsewhere.
            assert set(spans.peer[rows].tolist()) == ({0} if world is worlds.trainer else {OUTSIDE})


def test_a_clean_job_has_no_finding_and_says_that_members_are_of_another_world(weights: Path) -> None:
    for run_id, other in (("slurm-4711", "slurm-4711-world-2"), ("slurm-4711-world-2", "slurm-4711")):
        exit_code, output = invoke("doctor", str(weights / run_id))
        assert exit_code == 0, output
        assert HEALTHY in output
        assert f"of world {other} has members of another world" in " ".join(output.split())
        assert "damaged" not in output
        assert "impossible" not in output


def test_every_reading_command_tells_of_the_other_world(weights: Path) -> None:
    exit_code, output = invoke("summary", str(weights))
    assert exit_code == 0
    assert "Job slurm-4711: 2 worlds, 2 + 2 ranks." in output
    assert f"commtrace summary {weights / 'slurm-4711-world-2'}" in output
    assert len(json.loads(invoke("summary", str(weights), "--json")[1])["worlds"]) == 2

    exit_code, output = invoke("list", str(weights))
    assert exit_code == 0
    assert output.count("slurm-4711 ") == 1
    assert "slurm-4711-world-2" in output

    exit_code, output = invoke("doctor", str(weights))
    assert (exit_code, output.count(HEALTHY)) == (0, 2)

    exit_code, output = invoke("straggler", str(weights))
    assert exit_code == 2
    assert "holds the 2 worlds of a job" in output

    for command in ("summary", "straggler", "bandwidth", "pipeline"):
        output = invoke(command, str(weights / "slurm-4711"))[1]
        assert "has another world, with ranks of its own" in " ".join(output.split()), command


def test_no_message_over_worlds_is_dropped_or_given_a_wrong_peer(by_hand: Path) -> None:
    worlds = told_apart(worlds_below(by_hand), "refit")
    ours, theirs = worlds.group("refit")

    assert [world.problems for world in worlds] == [(), ()]
    assert ours.key == theirs.key != ""
    for world, group, shift in ((worlds.trainer, ours, 2), (worlds.rollout, theirs, 0)):
        for rank, trace in world.ranks.items():
            spans = trace.spans
            messages = (spans.kind == schema.P2P) & (spans.group == group.id)
            assert np.count_nonzero(messages) == ITERATIONS
            # The partner is the rank with the same number in the other world.
            assert set(spans.peer[messages].tolist()) == {OUTSIDE + shift + rank}
            partner = group.members[shift + rank]
            assert partner is not None
            assert (partner.rank, partner.world == world.any_metadata.world) == (rank, False)


def test_a_job_with_messages_over_worlds_is_read_by_all_commands(by_hand: Path) -> None:
    for run_id in ("slurm-4711", "slurm-4711-world-2"):
        exit_code, output = invoke("doctor", str(by_hand / run_id))
        assert exit_code == 0, output
        for command in ("summary", "straggler", "bandwidth", "pipeline", "whatif"):
            exit_code, output = invoke(command, str(by_hand / run_id))
            assert exit_code == 0, output
            assert str(OUTSIDE)[:6] not in output


def test_a_hang_names_the_member_of_the_other_world_with_its_place(hangs: Path) -> None:
    worlds = told_apart(worlds_below(hangs), "weights")
    exit_code, output = invoke("doctor", str(worlds.trainer.path))
    words = " ".join(output.split())
    other = worlds.rollout.any_metadata.run_id

    assert exit_code == 1
    assert f"The job hangs: 1 communication is held up by rank 1 of world {other}." in words or (
        f"The job hangs: 2 communications are held up by rank 1 of world {other}." in words
    )
    assert f"Missing: rank 1 of world {other} (last there: seq {ITERATIONS - 2}): inside user generate" in words
    assert "worlds.py" in words
    assert f"Missing: rank 0 of world {other}" not in words  # it has arrived


def test_a_hang_is_found_from_the_directory_of_the_job(hangs: Path) -> None:
    worlds = told_apart(worlds_below(hangs), "weights")
    exit_code, output = invoke("doctor", str(hangs), "--json")
    told = json.loads(output[output.index("{") :])

    assert exit_code == 1
    of_trainers = next(world for world in told["worlds"] if world["run"]["id"] == worlds.trainer.any_metadata.run_id)
    (stop,) = [stop for stop in of_trainers["hang"]["stops"] if stop["group"]["name"] == "weights"]
    members = {member["number"]: member for member in stop["elsewhere"]}
    assert {number: member["rank"] for number, member in members.items()} == {1: 0, 2: 1}
    assert (members[1]["launched"], members[2]["launched"]) == (ITERATIONS, ITERATIONS - 1)
    assert members[2]["activity"]["open"][0]["name"] == "generate"


@pytest.mark.timeout(600)
def test_nothing_is_lost_when_both_worlds_begin_at_the_same_instant(tmp_path: Path) -> None:
    for time_ in range(6):
        directory = tmp_path / str(time_)
        completed = job(directory, "begins")
        assert completed.stdout.count("has ended well") == 4, completed.stdout
        runs = worlds_below(directory)
        assert [world.path.name for world in runs] == ["slurm-4711", "slurm-4711-world-2"]
        assert [list(world.ranks) for world in runs] == [[0, 1], [0, 1]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("given", ["{run_id}", "fixed"])
def test_commtrace_run_says_how_many_worlds_it_has_recorded(tmp_path: Path, given: str) -> None:
    """With a fixed directory the second world is in a folder of it."""
    ranks = [sys.executable, str(REPOSITORY / "tests" / "e2e" / "ranks.py"), "4", str(PROGRAM), "begins"]
    recorded = [sys.executable, "-m", "commtrace", "run", "--dir", f"{tmp_path}/{given}", "--", *ranks]
    completed = run(recorded, env={"NEMO_LENS_RUN_ID": "lens-1"}, timeout=200)
    first = tmp_path / ("lens-1" if given == "{run_id}" else given)
    second = tmp_path / "lens-1-world-2" if given == "{run_id}" else first / "world-2"

    assert completed.returncode == 0, completed.stdout
    assert "commtrace: recorded 2 worlds: 2 + 2 ranks" in completed.stdout
    for directory in (first, second):
        assert f"recorded 2 ranks in {directory}\n" in completed.stdout
        assert list(load_run(directory).ranks) == [0, 1]
    exit_code, output = invoke("list", str(tmp_path))
    assert exit_code == 0
    assert "2 runs" in output
    assert str(second.relative_to(tmp_path)) in output
    assert "has another world" in " ".join(invoke("summary", str(first))[1].split())
