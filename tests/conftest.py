"""Settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Deadlines per example measure how busy the machine is. A test that hangs is ended by pytest-timeout.
settings.register_profile("commtrace", deadline=None)
settings.load_profile("commtrace")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repetitions", type=int, default=3, help="how often a job is run whose failure would be a matter of luck"
    )
