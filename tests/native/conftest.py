"""What the tests of the native part share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.capture.recording import Recording, fake_backend
from tests.native.bare_core import load_core
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


@pytest.fixture
def native_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recordings are made by the native part; skips the test where it was not built."""
    core = load_core()
    monkeypatch.setattr(Recording, "engine", "native")
    yield
    core.use_clock(0)


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 0 of 4 on the fake backend."""
    with fake_backend():
        yield
