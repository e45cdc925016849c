"""Rule files are what rules.py says, and promtool agrees that each alert fires when it should and only then."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.prometheus_rules import DIRECTORY, Timing, alerts, rule_files, write

CASES = Path(__file__).with_name("alerts.test.yml")
STORIES = Path(__file__).with_name("test_alert_stories.py")
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def test_the_files_that_are_checked_in_are_those_that_are_generated() -> None:
    checked_in = {path.name: path.read_text() for path in DIRECTORY.iterdir()}

    assert checked_in == rule_files(), "run python -m tools.prometheus_rules"


@needs_promtool
def test_prometheus_accepts_the_rules_with_any_timing(tmp_path: Path) -> None:
    paths = write(tmp_path, Timing(window="30s", baseline="10m", stalled=60), interval="5s")
    checked = promtool("check", "rules", *paths)

    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    tested = promtool("test", "rules", CASES)

    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases, stories = CASES.read_text(), STORIES.read_text()
    for alert in alerts(Timing()):
        if f'"{alert.name}"' in stories and f"alertname: {alert.name}" not in cases:
            continue  # every story says which ones fire, and that all others do not
        blocks = cases.split(f"alertname: {alert.name}")[1:]
        expected = [block.split("alertname:")[0].split("exp_alerts:")[1].lstrip(" ") for block in blocks]
        assert any(text.startswith("\n") for text in expected), f"{alert.name} never fires in {CASES.name}"
        if alert.name != "CommtraceClockResidual":  # fires for one of two ranks in the same case
            assert any(text.startswith("[]") for text in expected), f"{alert.name} always fires in {CASES.name}"
