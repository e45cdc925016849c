"""Fixtures of the tests of capture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commtrace import _native
from tests.capture.recording import Recording, fake_backend

CORE, _ = _native.load()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test of capture with both engines, but those that are marked for one of them."""
    marker = metafunc.definition.get_closest_marker("engine")
    metafunc.parametrize("engine", ["python", "native"] if marker is None else marker.args, indirect=True)


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What records."""
    monkeypatch.setattr(Recording, "engine", request.param)
    yield request.param
    if CORE is not None:
        CORE.use_clock(0)


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 1 of 4 on the fake backend."""
    with fake_backend(rank=1):
        yield


@pytest.fixture
def captured(recording: Recording, world: None) -> Iterator[Recording]:
    """Rank 1 of 4, with every communication captured."""
    with recording.capturing():
        yield recording
