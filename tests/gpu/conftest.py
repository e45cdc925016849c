"""Prints one table of what the GPU tests have found, whatever becomes of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from tests.gpu.jobs import SECONDS, start_clock
from tests.gpu.machine import machine
from tests.gpu.table import FAILS, HOLDS, Row, markdown

_ROWS: Final = pytest.StashKey[list[Row]]()
_FIGURES: Final = pytest.StashKey[list[str]]()
_GRACE_SECONDS: Final = 15


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []
    config.addinivalue_line("markers", "answers(question): which row of the table a test answers")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> list[str]:
    """What a test has measured, for its row of the table."""
    return request.node.stash.setdefault(_FIGURES, [])


@pytest.fixture(scope="package", autouse=True)
def end_in_time() -> Iterator[None]:
    """Every job has a timeout of its own. Should this process itself hang, the table is printed all the same."""

    if not torch.cuda.is_available():
        yield
        return

    def end(_signal: int, _frame: Any) -> None:
        pytest.exit(f"the GPU tests did not end within {SECONDS:.0f} s", returncode=1)

    start_clock()
    earlier = signal.signal(signal.SIGALRM, end)
    signal.alarm(int(SECONDS) + _GRACE_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report: pytest.TestReport = outcome.get_result()
    marker = item.get_closest_marker("answers")
    if marker is None or (report.when != "call" and report.passed) or report.when == "teardown":
        return
    backend = getattr(item, "callspec", None)
    verdict = HOLDS
    if report.skipped:
        verdict = (
            f"not run: {report.longrepr[2].removeprefix('Skipped: ')}" if isinstance(report.longrepr, tuple) else ""
        )
    elif report.failed:
        verdict = f"{FAILS}: {str(call.excinfo.value if call.excinfo else '')[:200]}"
    figures: list[str] = item.stash.get(_FIGURES, [])
    name = str(backend.params.get("backend", "")) if backend is not None else ""
    item.config.stash[_ROWS].append(Row(marker.args[0], name, verdict, "; ".join(figures)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_ROWS]
    if not rows or (
        all(row.verdict.startswith("not run") for row in rows) and not any("gpu" in a for a in config.args)
    ):
        return  # a run of all tests, on a machine without a GPU
    terminalreporter.section("GPU validation, for docs/gpu-validation.md")
    terminalreporter.write_line(markdown(rows, machine()))
