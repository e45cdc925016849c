"""Settings of all tests."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import pytest

from tests.skips import Skips, expected_skips

if importlib.util.find_spec("hypothesis"):  # The tests of tests/gpu run on machines that have only torch and pytest.
    from hypothesis import settings

    # Deadlines per example measure how busy the machine is. A test that hangs is ended by pytest-timeout.
    settings.register_profile("commtrace", deadline=None)
    settings.load_profile("commtrace")


SHARING: Final = (
    "tests/browser/test_perfetto_ui.py",
    "tests/browser/test_report_in_browser.py",
    "tests/e2e/launchers/test_slow_link.py",
    "tests/e2e/launchers/test_slurm.py",
    "tests/e2e/test_doctor.py",
    "tests/e2e/test_safety_fates.py",
    "tests/e2e/test_straggler_causes.py",
    "tests/test_packaging.py",
)
"""Modules whose tests look at one thing that is expensive to make, such as a recorded job: they stay in one process."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too: `make test-long` does")
    parser.addoption(
        "--repetitions", type=int, default=20, metavar="N",
        help="with --long, how often a job is run whose failure would be a matter of luck (20)",
    )  # fmt: skip
    parser.addoption(
        "--expected-skips",
        choices=["test", "test-newest"],
        help="fail where a test is skipped for a reason that tests/expected_skips.txt does not list for this target",
    )
    if not pluginmanager.hasplugin("timeout"):  # pyproject.toml sets the options of pytest-timeout.
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "without effect: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--expected-skips")
    if target is not None and not hasattr(config, "workerinput"):  # xdist's workers report to this process
        config.pluginmanager.register(Skips(expected_skips(target)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests one by one, but for the modules that share something: these as a whole, and first."""
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if path in SHARING else nodeid

    return Sharing(config, log)
