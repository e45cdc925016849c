"""Real jobs that hang, die or end: the doctor names the group, the number, the rank, and what it was doing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.hangs.examination import examine
from commtrace.cli.commands.doctor import HEALTHY
from commtrace.cli.main import app
from commtrace.trace.processes import process_state
from tests.e2e.launch import REPOSITORY
from tests.findings.reading import said
from tests.json_schemas import errors

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "hangs.py"
LOOKED_AT_WHILE_THEY_RUN = (
    "one_is_killed",
    "a_chain_through_groups",
    "one_is_stopped_while_it_trains",
    "one_keeps_the_lock_of_its_interpreter",
    "all_end_well",
)


class Jobs:
    """What the doctor says of each job: while it hung, and after it was killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, dict[str, Any]] = {}

    def told(self, name: str) -> dict[str, Any]:
        return examine(self.folder / name, now_ns=time.time_ns(), ask=process_state).to_json()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("hangs")
    found = Jobs(folder)
    process = subprocess.Popen([sys.executable, str(PROGRAM), str(folder)], cwd=REPOSITORY)
    try:
        deadline = time.monotonic() + 150
        while not (folder / "hanging").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        found.running = {name: found.told(name) for name in LOOKED_AT_WHILE_THEY_RUN}
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    return found


def stop_of(told: dict[str, Any], role: str) -> dict[str, Any]:
    (stop,) = [stop for stop in told["hang"]["stops"] if stop["group"]["role"] == role]
    return dict(stop)


def roots(told: dict[str, Any]) -> list[int]:
    return [root["rank"] for root in told["hang"]["chains"]["roots"]]


def test_a_rank_that_sleeps_in_a_step_of_which_nothing_is_recorded(jobs: Jobs) -> None:
    told = jobs.told("one_sleeps_in_a_step_that_is_not_recorded")
    stop = stop_of(told, "right")

    assert (stop["kind"], stop["seq"], stop["arrived"]) == ("hung", 5, [3])
    assert stop["missing"] == [{"rank": 2, "last_seq": 4}]
    assert roots(told) == [2]
    assert "one_sleeps_in_a_step_that_is_not_recorded" in told["hang"]["last_activities"]["2"]["frames"][0]
    assert all(seen["missing"] == 0 for group in told["groups"] for seen in group["collectives"])


def test_a_rank_that_sleeps_before_a_collective_of_a_subgroup(jobs: Jobs) -> None:
    told = jobs.told("one_sleeps_before_a_collective_of_a_subgroup")
    stop = stop_of(told, "right")

    assert (stop["kind"], stop["seq"], stop["arrived"]) == ("hung", 5, [3])
    assert stop["missing"] == [{"rank": 2, "last_seq": 4}]
    assert stop["operations"] == {"all_reduce": [3]}
    assert roots(told) == [2]
    doing = told["hang"]["last_activities"]["2"]
    assert [(span["kind"], span["name"]) for span in doing["open"]] == [("user", "load shard")]
    assert doing["step"] == 5
    assert doing["at"].endswith("one_sleeps_before_a_collective_of_a_subgroup")
    assert doing["at"].startswith(str(PROGRAM))
    assert told["findings"][0]["evidence"] == "The job hangs: 2 communications are held up by rank 2."
    assert [one["state"] for one in told["ranks"]] == ["stopped"] * 4


def test_a_rank_that_died_in_mid_run(jobs: Jobs) -> None:
    live = jobs.running["one_is_killed"]
    # gloo told rank 0 that the connection was closed: it raised, and ended.
    assert [one["state"] for one in live["ranks"]] == ["ended", "silent", "running", "running"]
    assert [one["process"] for one in live["ranks"]] == [None, "gone", "runs", "runs"]

    told = jobs.told("one_is_killed")
    assert [one["state"] for one in told["ranks"]] == ["ended", "silent", "stopped", "stopped"]
    assert told["findings"][0]["evidence"].startswith("Failed first: rank 1 on ")
    assert "Rank 0 failed because it was gone." in told["findings"][0]["evidence"]
    (silence,) = [one for one in said(told["findings"]) if one.startswith("Rank 1 gave its last sign of life")]
    assert silence.endswith(" is gone.")


def test_a_rank_that_was_killed_while_the_others_raised(jobs: Jobs) -> None:
    told = jobs.told("one_is_killed_and_the_others_raise")
    assert [one["exception"] for one in told["ranks"]] == ["RuntimeError", None, "RuntimeError", "RuntimeError"]
    first, others = said(told["findings"])[:2]
    assert first.startswith("Failed first: rank 1 on ")
    assert "Ranks 0, 2–3 failed because it was gone. Until it is known why, keep its node out " in first
    assert others.startswith("Ranks 0, 2–3 ended with an uncaught RuntimeError in barrier ")
    assert f"at {PROGRAM}" in others
    shown = CliRunner().invoke(app, ["doctor", str(jobs.folder / "one_is_killed_and_the_others_raise")]).output
    assert "ended with an uncaught exception: 0, 2–3" in shown
    assert "ended cleanly" not in shown


def test_no_survivor_of_a_ddp_job_failed_before_the_ranks_that_were_killed(jobs: Jobs) -> None:
    """The first to look may see one of the two only."""
    told = jobs.told("two_are_killed_and_ddp_of_the_others_raises")
    assert [one["exception"] for one in told["ranks"]] == ["RuntimeError", "RuntimeError", None, None]
    assert told["first_failure"]["cut_off"] == [0, 1]
    assert set(told["first_failure"]["ranks"]) <= {2, 3}
    assert not told["first_failure"]["raised"]
    assert [one["failures"][-1]["operation"] for one in told["ranks"][:2]] == ["all_reduce", "all_reduce"]


def test_a_rank_that_calls_another_operation(jobs: Jobs) -> None:
    told = jobs.told("one_calls_another_operation")
    (mismatch,) = told["mismatches"]["first"]

    assert (mismatch["group"]["role"], mismatch["seq"]) == ("world", 0)
    assert mismatch["differ"] == ["operation", "bytes"]
    assert {call["operation"]: (call["bytes"], call["ranks"]) for call in mismatch["calls"]} == {
        "all_reduce": (40, [0, 1, 2]),
        "broadcast": (80, [3]),
    }
    assert any("Members did not call the same at 1 place" in finding for finding in said(told["findings"]))


def test_a_message_that_nobody_sends(jobs: Jobs) -> None:
    told = jobs.told("one_waits_for_a_message_that_nobody_sends")
    (stop,) = [stop for stop in told["hang"]["stops"] if "message" in stop]

    assert stop["message"] == {"sender": 1, "receiver": 0, "tag": 7}
    assert (stop["seq"], stop["arrived"], stop["missing"]) == (0, [0], [{"rank": 1, "last_seq": None}])
    # 0 waits for the message of 1, and 1 in the barrier for 0: nobody is left to blame.
    assert len(told["hang"]["chains"]["cycles"]) == 1


def test_a_chain_through_groups(jobs: Jobs) -> None:
    for told in (jobs.running["a_chain_through_groups"], jobs.told("a_chain_through_groups")):
        assert roots(told) == [2]
        stops = told["hang"]["stops"]
        position = {stop["group"]["role"]: at for at, stop in enumerate(stops)}
        (link,) = told["hang"]["chains"]["links"][str(position["left"])]
        assert link == {"ranks": [1], "waits_at_stop": position["middle"], "is_certain": True}
    assert {one["state"] for one in jobs.running["a_chain_through_groups"]["ranks"]} == {"running"}


def test_a_rank_that_is_stopped_while_it_trains(jobs: Jobs) -> None:
    """Seconds later, and after all were killed: the number is the one that the others wait at."""
    assert jobs.running["one_is_stopped_while_it_trains"]["ranks"][2]["process"] == "suspended"
    assert any(
        " is suspended, by SIGSTOP or a debugger; kill -CONT " in one
        for one in said(jobs.running["one_is_stopped_while_it_trains"]["findings"])
    )
    for told in (jobs.running["one_is_stopped_while_it_trains"], jobs.told("one_is_stopped_while_it_trains")):
        assert told["hang"]["is_hung"]
        assert roots(told) == [2]
        stop = stop_of(told, "right")
        assert (stop["kind"], stop["arrived"]) == ("hung", [3])
        assert stop["missing"] == [{"rank": 2, "last_seq": stop["seq"] - 1}]
        assert any(one.startswith("The job hangs") and one.endswith(" by rank 2.") for one in said(told["findings"]))


def test_a_rank_in_code_that_keeps_the_lock_of_its_interpreter(jobs: Jobs) -> None:
    """No thread of its own can say where it is: a timer of the kernel has had it written."""
    name = "one_keeps_the_lock_of_its_interpreter"
    place = rf"{re.escape(str(PROGRAM))}:\d+ {name}"
    for told, why in (
        (jobs.running[name], rf"lives and lets no other thread of Python run: code in C keeps its lock, at {place}; "),
        (jobs.told(name), rf"is gone; before, code in C at {place} let no other thread of Python run\."),
    ):
        assert roots(told) == [2]
        assert re.fullmatch(place, told["ranks"][2]["stack_at"])
        (silence,) = [one for one in said(told["findings"]) if one.startswith("Rank 2 gave its last sign of life")]
        assert re.search(why, silence)


def test_ranks_that_wait_for_each_other(jobs: Jobs) -> None:
    told = jobs.told("two_wait_for_each_other")
    (cycle,) = told["hang"]["chains"]["cycles"]

    assert {told["hang"]["stops"][position]["group"]["role"] for position in cycle} == {"middle", "right", "outer"}
    assert any(one.startswith("Deadlock: 3 communications wait for each other: ") for one in said(told["findings"]))


def test_a_job_killed_while_it_trains_has_stopped_and_not_hung(jobs: Jobs) -> None:
    told = jobs.told("all_are_killed_while_they_train")

    assert told["hang"]["is_hung"] is False
    assert said(told["findings"]) == [
        "The files of ranks 0–3 break off: killed, a crash below Python, or a directory that could not be written "
        "any more (the log says so).",
    ]


def test_a_normal_end_is_healthy(jobs: Jobs) -> None:
    for told in (jobs.running["all_end_well"], jobs.told("all_end_well")):
        assert told["findings"] == []
        assert {one["state"] for one in told["ranks"]} == {"ended"}
    assert all(seen["missing"] == 0 for group in told["groups"] for seen in group["collectives"])


def test_every_diagnosis_matches_the_schema(jobs: Jobs) -> None:
    dead = [jobs.told(path.name) for path in jobs.folder.iterdir() if path.is_dir()]
    assert len(dead) > len(LOOKED_AT_WHILE_THEY_RUN)
    for told in (*jobs.running.values(), *dead):
        assert list(errors("doctor", json.loads(json.dumps(told)))) == []


def test_the_command_says_it_and_its_exit_code(jobs: Jobs) -> None:
    healthy = CliRunner().invoke(app, ["doctor", str(jobs.folder / "all_end_well")])
    hung = CliRunner().invoke(app, ["doctor", str(jobs.folder / "one_sleeps_before_a_collective_of_a_subgroup")])

    assert (healthy.exit_code, hung.exit_code) == (0, 1)
    assert HEALTHY in healthy.output
    assert "Hung at seq 5 of the right group of ranks 2–3. Arrived: rank 3 in all_reduce" in hung.output
    assert "Root: rank 2, which holds up 3 ranks. Rank 2: inside user load shard" in hung.output


@pytest.mark.parametrize("command", ["summary", "straggler", "bandwidth"])
def test_other_commands_say_first_that_the_job_hung(command: str, jobs: Jobs) -> None:
    run = jobs.folder / "one_sleeps_before_a_collective_of_a_subgroup"
    result = CliRunner().invoke(app, [command, str(run), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)

    assert answer["findings"][0]["kind"] == "hang"
    assert answer["findings"][0]["ranks"] == [2]
    said_first = "The job hangs: 2 communications are held up by rank 2. See where each rank is: commtrace doctor "
    assert answer["verdict"].startswith(said_first)
