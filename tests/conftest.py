"""Settings of all tests."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis"):  # The tests of tests/gpu run on machines that have only torch and pytest.
    from hypothesis import settings

    # Deadlines per example measure how busy the machine is. A test that hangs is ended by pytest-timeout.
    settings.register_profile("commtrace", deadline=None)
    settings.load_profile("commtrace")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--repetitions", type=int, default=3, help="how often a job is run whose failure would be a matter of luck"
    )
    if not pluginmanager.hasplugin("timeout"):  # pyproject.toml sets the options of pytest-timeout.
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "without effect: pytest-timeout is not installed")
