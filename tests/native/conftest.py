"""What the tests of the native part share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native.simulated_driver import SimulatedDriver, load


@pytest.fixture(scope="session")
def built_driver() -> SimulatedDriver:
    """The simulated driver, built once; skips the test where there is no compiler."""
    return load()


@pytest.fixture
def driver(built_driver: SimulatedDriver) -> Iterator[SimulatedDriver]:
    """The simulated driver of a job that computes on device 0, in scripted time."""
    built_driver.reset()
    built_driver.initialize()
    yield built_driver
    built_driver.reset()
