"""What happens to jobs, and which alerts fire meanwhile: promtool evaluates the rules at every moment of each story."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from commtrace.exporters.prometheus.step_histogram import BOUNDS_SECONDS
from tools.prometheus_rules import Timing, alerts, write

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")

SCRAPE_SECONDS = 15
TIMING = Timing(baseline="10m")
_BOUNDS = [bound for bound in BOUNDS_SECONDS if 0.9 < bound < 1.3]
STALE = "stale"


@dataclass(frozen=True)
class Moment:
    """A rank as it is scraped: ``up`` is None without a target, 0 if it does not answer."""

    up: int | None = 1
    step_seconds: float = 0.0  # 0: no step ends
    mfu: float = 0.4
    phase: str = ""
    hung: bool = False
    launch: int = 0
    old_file: bool = False  # of node-exporter: the samples of before


TRAINS = Moment(step_seconds=1.0)
NO_ANSWER = Moment(up=0)
NO_TARGET = Moment(up=None)


def minutes(story: Mapping[float, Moment], length: float = 30) -> list[Moment]:
    """Each scrape of a rank that is in these states from these minutes on."""
    starts = sorted(story)
    times = [number * SCRAPE_SECONDS / 60 for number in range(round(length * 60 / SCRAPE_SECONDS))]
    return [story[max(start for start in starts if start <= time)] for time in times]


class Rank:
    """The series of one rank."""

    def __init__(self, number: int, moments: list[Moment]) -> None:
        self.number = number
        self.series: dict[str, list[str]] = {}
        for at, moment in enumerate(moments):
            self._scrape(at, moments[:at], moment)

    def _scrape(self, at: int, before: list[Moment], moment: Moment) -> None:
        found = dict(self._samples(at, before, moment))
        for name in {*self.series, *found}:
            values = self.series.setdefault(name, ["_"] * at)
            ended = values[-1:] not in ([], ["_"], [STALE])
            values.append(found.get(name, STALE if ended else "_"))

    def _samples(self, at: int, before: list[Moment], moment: Moment) -> Iterator[tuple[str, str]]:
        if moment.old_file:
            yield from ((name, values[-1]) for name, values in self.series.items() if not name.startswith("up{"))
            return
        if moment.up is not None:
            instance = f'instance="launch-{moment.launch}"'
            yield f"up{{{self._labels}, {instance}}}", str(moment.up)
        if moment.up != 1:
            return
        past = [one for one in (*before, moment) if one.up == 1 and one.launch == moment.launch]
        now = at * SCRAPE_SECONDS

        def sample(name: str, value: float, labels: str = "") -> tuple[str, str]:
            return f"commtrace_{name}{{{self._labels}{labels}}}", f"{value:g}"

        yield sample("exported_timestamp_seconds", now)
        yield sample("hung", moment.hung)
        for phase in ("checkpoint", "evaluation"):
            yield sample("open_phase", moment.phase == phase, f', phase="{phase}"')
        training = [(number, one) for number, one in enumerate(past) if one.step_seconds]
        if not training:
            return
        steps = [SCRAPE_SECONDS / one.step_seconds for _, one in training]
        yield sample("step_duration_seconds_count", sum(steps))
        yield sample("step_duration_seconds_sum", len(steps) * SCRAPE_SECONDS)
        yield sample("work_seconds_total", len(steps) * SCRAPE_SECONDS / 2)
        for bound in _BOUNDS:
            below = sum(number for number, (_, one) in zip(steps, training, strict=True) if one.step_seconds <= bound)
            yield sample("step_duration_seconds_bucket", below, f', le="{bound}"')
        yield sample("step_duration_seconds_bucket", sum(steps), ', le="+Inf"')
        states = enumerate((*before, moment))
        last = max(number for number, one in states if one.step_seconds and one.launch == moment.launch)
        yield sample("last_step_timestamp_seconds", last * SCRAPE_SECONDS)
        yield sample("last_step", sum(steps))
        yield sample("mfu_ratio", training[-1][1].mfu)

    @property
    def _labels(self) -> str:
        return f'run_id="r", rank="{self.number}", local_rank="{self.number}", node="n{self.number}"'


def fired(directory: Path, *ranks: list[Moment]) -> set[str]:
    """The names of the alerts that fired at any time."""
    names = [alert.name for alert in alerts(TIMING)]
    series = [
        {"series": name, "values": " ".join(values)}
        for number, moments in enumerate(ranks)
        for name, values in Rank(number, moments).series.items()
    ]
    length = len(ranks[0]) * SCRAPE_SECONDS
    # promtool prints the answers where nothing is expected.
    asked = [
        {"expr": f"count_over_time(ALERTS{{alertname='{name}'}}[{length}s])", "eval_time": f"{length}s"}
        for name in names
    ]
    cases = {
        "rule_files": [str(path) for path in write(directory, TIMING, f"{SCRAPE_SECONDS}s")],
        "evaluation_interval": f"{SCRAPE_SECONDS}s",
        "tests": [{"interval": f"{SCRAPE_SECONDS}s", "input_series": series, "promql_expr_test": asked}],
    }
    path = directory / "story.yml"
    path.write_text(json.dumps(cases))
    assert PROMTOOL is not None
    completed = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, timeout=120)
    text = completed.stdout + completed.stderr
    found = {name for name in names if f"alertname='{name}'" in text}
    assert (completed.returncode == 0) == (not found), text
    return found


def same(story: Mapping[float, Moment], length: float = 30, ranks: int = 3) -> list[list[Moment]]:
    return [minutes(story, length)] * ranks


def test_a_job_that_trains_and_ends_in_order(tmp_path: Path) -> None:
    assert fired(tmp_path, *same({0: TRAINS, 20: NO_TARGET})) == set()


def test_a_cancelled_job_is_no_critical_alert_even_if_some_ranks_need_half_a_minute_to_die(tmp_path: Path) -> None:
    at_once, later = minutes({0: TRAINS, 15: NO_ANSWER}), minutes({0: TRAINS, 15.5: NO_ANSWER})
    assert fired(tmp_path, at_once, at_once, later) == {"CommtraceJobKilled"}


def test_a_rank_that_is_gone_while_others_wait_for_it(tmp_path: Path) -> None:
    waits = minutes({0: TRAINS, 15: Moment()})
    assert fired(tmp_path, minutes({0: TRAINS, 15: NO_ANSWER}), waits, waits) == {
        "CommtraceRanksGone", "CommtraceStepStalled",
    }  # fmt: skip


@pytest.mark.parametrize("back", [18.0, 25.0])
def test_a_job_that_is_started_again_elsewhere(tmp_path: Path, back: float) -> None:
    again = Moment(step_seconds=1.0, launch=1)
    ranks = [minutes({0: TRAINS, 15: NO_ANSWER, back: again}), minutes({0: TRAINS, 15: NO_ANSWER, back + 0.25: again})]
    assert fired(tmp_path, *ranks) == {"CommtraceJobKilled"}


def test_a_first_step_of_ten_minutes(tmp_path: Path) -> None:
    assert fired(tmp_path, *same({0: Moment(), 10: TRAINS})) == set()


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint"])
def test_a_pause_of_ten_minutes_for_an_evaluation_or_a_checkpoint(tmp_path: Path, phase: str) -> None:
    pauses, waits = Moment(phase=phase), Moment(hung=True)
    assert (
        fired(tmp_path, minutes({0: TRAINS, 10: pauses, 20: TRAINS}), minutes({0: TRAINS, 10: waits, 20: TRAINS}))
        == set()
    )


def test_a_job_in_which_nothing_moves(tmp_path: Path) -> None:
    assert fired(tmp_path, *same({0: TRAINS, 10: Moment(hung=True)})) == {"CommtraceHung", "CommtraceStepStalled"}


def test_files_for_node_exporter_that_a_killed_job_has_left(tmp_path: Path) -> None:
    left = Moment(up=None, old_file=True)
    assert fired(tmp_path, *same({0: TRAINS, 10: left})) == set()
    hung = Moment(hung=True)
    assert fired(tmp_path, *same({0: TRAINS, 10: hung, 10.5: left}, 20)) <= {"CommtraceHung"}


def test_steps_that_become_a_tenth_longer_and_a_lower_mfu(tmp_path: Path) -> None:
    slower = Moment(step_seconds=1.1, mfu=0.4 / 1.1)
    assert fired(tmp_path, *same({0: TRAINS, 20: slower}, 29, 2)) == {"CommtraceStepSlower", "CommtraceMfuDown"}


def test_steps_that_are_hardly_longer_or_belong_to_fewer_ranks(tmp_path: Path) -> None:
    hardly = Moment(step_seconds=1.03, mfu=0.4 / 1.03)
    assert fired(tmp_path, *same({0: TRAINS, 20: hardly}, 29, 2)) == set()
    fewer = Moment(step_seconds=2.0, launch=1)
    ends, goes_on = minutes({0: TRAINS, 20: NO_TARGET}), minutes({0: TRAINS, 20: NO_TARGET, 21: fewer})
    assert fired(tmp_path, ends, goes_on) == set()


def test_one_long_step_in_a_while_is_no_slower_job(tmp_path: Path) -> None:
    long = Moment(step_seconds=15.0, mfu=0.05)
    stalls = {20.0 + 2 * number: long for number in range(5)}
    story = {0: TRAINS, **stalls, **{start + 0.25: TRAINS for start in stalls}}
    assert fired(tmp_path, *same(story, 30, 2)) == set()
