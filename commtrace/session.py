"""placeholder"""

from contextlib import contextmanager
from collections.abc import Iterator
from commtrace.config import Config


def start(config: Config | None = None) -> None: ...
def stop() -> None: ...


@contextmanager
def step(number: int) -> Iterator[None]:
    yield


@contextmanager
def span(name: str) -> Iterator[None]:
    yield
