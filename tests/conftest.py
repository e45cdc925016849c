"""Settings of all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.reference import VARIABLE
from tests.skips import Skips, expected_skips

if importlib.util.find_spec("hypothesis"):  # The tests of tests/gpu run on machines that have only torch and pytest.
    from hypothesis import settings

    # Deadlines per example measure how busy the machine is. A test that hangs is ended by pytest-timeout.
    settings.register_profile("commtrace", deadline=None)
    settings.load_profile("commtrace")

if f"COMMTRACE_{VARIABLE}" in os.environ:
    os.environ[VARIABLE] = os.environ.pop(f"COMMTRACE_{VARIABLE}")

# Hints name commtrace as a shell finds it: as in an activated environment.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])

LONGEST: Final = (
    "tests/e2e/test_straggler_causes.py",
    "tests/e2e/test_safety_fates.py",
    "tests/e2e/test_prometheus.py",
    "tests/e2e/test_megatron_training.py",
    "tests/e2e/test_monitor.py",
    "tests/e2e/test_doctor.py",
    "tests/e2e/launchers/test_slurm.py",
    "tests/e2e/launchers/test_torchrun.py",
    "tests/e2e/launchers/test_deepspeed.py",
    "tests/e2e/test_capture_origins.py",
    "tests/e2e/test_safety_everything.py",
    "tests/e2e/test_megatron_experts.py",
    "tests/e2e/launchers/test_slow_link.py",
    "tests/e2e/test_two_nodes.py",
    "tests/e2e/test_hang_watch.py",
    "tests/e2e/test_trigger.py",
    "tests/e2e/test_safety_training.py",
)
"""Modules that begin first: at the end of a run no process is to be left alone with one of them."""


@pytest.fixture(autouse=True)
def _no_recording_is_left_on() -> Iterator[None]:
    """A recording that a test leaves on would take part in all tests of its process."""
    yield
    session = sys.modules.get("commtrace.recording.session")
    if session is not None and session._current is not None:
        session.stop()
        pytest.fail("a recording is on after the test: it was left on by this one, or by the import of a test module")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--thorough", action="store_true", help="run the tests marked thorough, too")
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
    """Leave out what is long, and begin with what takes the longest.

    With ``--dist worksteal`` a process has tests that follow one another, so that a module's fixture is made once, and
    a process that has none left takes some from the end of what another one has.
    """
    markers = [marker for marker in ("thorough", "long") if not config.getoption(f"--{marker}")]
    left_out = [item for item in items if any(map(item.get_closest_marker, markers))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not any(map(item.get_closest_marker, markers))]
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of the garbage collections that tests ask for: they are there for good."""
    gc.collect()
    gc.freeze()


def _place(item: pytest.Item) -> tuple[int, bool]:
    module = item.nodeid.partition("::")[0]
    return LONGEST.index(module) if module in LONGEST else len(LONGEST), item.get_closest_marker("e2e") is None
