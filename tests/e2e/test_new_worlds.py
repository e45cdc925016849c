"""Jobs that make their world anew in the same processes: each world has its own ranks, steps, groups and findings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from commtrace.cli.main import app
from tests.e2e.launch import REPOSITORY, Completed, fork
from tests.findings.reading import in_json
from tests.json_schemas import errors

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "new_worlds.py"
ENGINES = ("native", "python")

pytestmark = pytest.mark.e2e


def trained(scenario: str, directory: Path, engine: str = "native", *, nproc: int = 3) -> Completed:
    environment = {"COMMTRACE_DIR": str(directory), "COMMTRACE_RUN_ID": "job", "COMMTRACE_ENGINE": engine}
    completed = fork([PROGRAM, scenario], nproc=nproc, env=environment)
    assert completed.returncode == 0, completed.stdout
    return completed


def invoked(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def answer(command: str, *words: object) -> tuple[int, Any]:
    result = invoked(command, *words, "--json")
    printed = json.loads(result.stdout)
    assert list(errors(command, printed)) == []
    return result.exit_code, printed


class World(NamedTuple):
    attempt: int
    world_size: int
    first_step: int
    last_step: int
    moved: tuple[tuple[int, int], ...] = ()  # of processes that went on: rank here, rank in the next one


def worlds(directory: Path) -> list[World]:
    """Return the worlds of a job that ended well; there are no findings on it or on any of them."""
    _, newest = answer("summary", directory)
    earlier = newest["run"]["earlier_attempts"]
    found = [
        World(
            one["attempt"],
            one["world_size"],
            one["first_step"],
            one["last_step"],
            tuple((process["rank"], process["next_rank"]) for process in one["went_on"]),
        )
        for one in earlier
    ]
    assert all((one["state"], one["ending"]) == ("ended", "") for one in earlier), earlier
    for number in range(len(earlier) + 1):
        code, diagnosis = answer("doctor", directory, "--attempt", number)
        assert (code, diagnosis["findings"]) == (0, [])
        assert (diagnosis["run"]["attempt"], diagnosis["run"]["missing_ranks"]) == (number, [])
        _, summary = answer("summary", directory, "--attempt", number)
        steps = summary["run"]["steps"]
        recorded = (steps["left_out"][0]["first"], steps["last"])  # the first one is the warm-up
        size = summary["run"]["world_size"]
        if number < len(earlier):
            assert (size, *recorded) == found[number][1:4]
            assert len(steps["left_out"]) == 1
        else:
            found.append(World(number, size, *recorded))
        assert {row["group_size"] for row in summary["communication"]} == {size}
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_leaves_and_the_others_go_on_with_other_ranks(engine: str, tmp_path: Path) -> None:
    trained("shrink", tmp_path / "run", engine)

    assert worlds(tmp_path / "run") == [World(0, 3, 0, 9, ((1, 0), (2, 1))), World(1, 2, 10, 24)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_process_joins_as_rank_0_and_counts_on_from_the_steps_of_the_others(engine: str, tmp_path: Path) -> None:
    trained("grow", tmp_path / "run", engine)

    assert worlds(tmp_path / "run") == [World(0, 2, 0, 9, ((0, 1), (1, 2))), World(1, 3, 10, 21)]


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_change_their_places_and_one_stays(engine: str, tmp_path: Path) -> None:
    trained("permute", tmp_path / "run", engine)

    assert worlds(tmp_path / "run") == [World(0, 3, 0, 9, ((0, 2), (1, 1), (2, 0))), World(1, 3, 10, 21)]


def test_a_world_in_which_all_sit_as_before_goes_on(tmp_path: Path) -> None:
    trained("same", tmp_path / "run")

    assert worlds(tmp_path / "run") == [World(0, 3, 0, 17)]
    _, diagnosis = answer("doctor", tmp_path / "run")
    assert [[seen["recorded"] for seen in group["collectives"]] for group in diagnosis["groups"]] == [[12] * 3] * 3


def test_worlds_may_meet_at_one_store_by_prefixes(tmp_path: Path) -> None:
    trained("prefixes", tmp_path / "run")

    assert worlds(tmp_path / "run") == [World(0, 3, 0, 9, ((0, 2), (1, 1), (2, 0))), World(1, 3, 10, 21)]


def test_several_changes_one_after_the_other(tmp_path: Path) -> None:
    trained("several", tmp_path / "run")

    assert worlds(tmp_path / "run") == [
        World(0, 3, 0, 9, ((0, 1), (1, 0))),
        World(1, 2, 10, 19, ((1, 0),)),
        World(2, 2, 20, 28),
    ]


def test_another_process_takes_the_place_of_a_rank(tmp_path: Path) -> None:
    trained("replace", tmp_path / "run")

    assert worlds(tmp_path / "run") == [World(0, 2, 0, 9, ((0, 0),)), World(1, 2, 10, 18)]


def test_one_rank_goes_on_alone(tmp_path: Path) -> None:
    trained("alone", tmp_path / "run", nproc=2)

    assert worlds(tmp_path / "run") == [World(0, 2, 0, 9, ((1, 0),)), World(1, 1, 10, 18)]


def test_numbers_of_the_script_count_and_what_was_done_again_is_known(tmp_path: Path) -> None:
    trained("numbered", tmp_path / "run")

    assert worlds(tmp_path / "run") == [World(0, 3, 0, 9, ((1, 0), (2, 1))), World(1, 2, 7, 14)]
    _, summary = answer("summary", tmp_path / "run")
    assert [step["step"] for step in summary["repeated_steps"]] == [7, 8, 9]


def process_of(directory: Path, rank: int) -> str:
    """Return the words on a process that went on as ``rank``."""
    _, summary = answer("summary", directory)
    (one,) = (one for one in summary["run"]["earlier_attempts"][-1]["went_on"] if one["next_rank"] == rank)
    return f"Rank {rank} is process {one['pid']} on {one['host']}, which was rank {one['rank']} of attempt 1."


def test_a_straggler_is_named_by_its_rank_in_the_newest_world_with_its_process(tmp_path: Path) -> None:
    trained("straggle", tmp_path / "run")

    _, summary = answer("summary", tmp_path / "run")
    assert [finding["ranks"] for finding in in_json(summary)] == [[1]]
    assert process_of(tmp_path / "run", 1) in invoked("summary", tmp_path / "run").stdout
    assert process_of(tmp_path / "run", 1).endswith("which was rank 2 of attempt 1.")


def test_a_hang_is_named_by_its_rank_in_the_newest_world_with_its_process(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    environment = {"COMMTRACE_DIR": str(directory), "COMMTRACE_RUN_ID": "job"}
    began = time.monotonic()
    completed = fork([PROGRAM, "hang"], nproc=3, env=environment, timeout=25)
    assert completed.timed_out, f"it ended after {time.monotonic() - began:.0f} s: {completed.stdout}"

    code, diagnosis = answer("doctor", directory)
    assert (code, diagnosis["run"]["world_size"], diagnosis["run"]["attempt"]) == (1, 2, 1)
    assert diagnosis["findings"][0]["evidence"] == "The job hangs: 1 communication is held up by rank 1."
    assert [root["rank"] for root in diagnosis["hang"]["chains"]["roots"]] == [1]
    assert process_of(directory, 1) in invoked("doctor", directory).stdout
    assert answer("doctor", directory, "--attempt", 0)[0] == 0
