"""Skips that nobody expects are failures: where everything is installed that tests want, nothing may vanish silently.

``pytest --expected-skips test`` ends with 1 if a test was skipped for a reason that expected_skips.txt does not list.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

LIST: Final = Path(__file__).with_name("expected_skips.txt")


def expected_skips(target: str) -> list[str]:
    """Return the patterns of the reasons that are expected in a target of the Makefile."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    listed = [(where, reason.strip()) for where, _, reason in (line.partition(" ") for line in lines)]
    return [reason for where, reason in listed if where in ("all", target)]


class Skips:
    """A plugin that notes the skips that match no pattern, and lets the session fail because of them."""

    def __init__(self, expected: Sequence[str]) -> None:
        self._expected = expected
        self._unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ").strip()
        if not any(fnmatchcase(reason, pattern) for pattern in self._expected):
            self._unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unexpected:
            terminalreporter.section("unexpected skips")
            for line in self._unexpected:
                terminalreporter.write_line(line)
