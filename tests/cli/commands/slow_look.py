"""A look at what was recorded that takes four seconds of CPU time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from commtrace.cli.ended_command import EndedCommand


def main(descriptor: int, parent: int) -> None:
    connection = Connection(descriptor)
    connection.send(tell(connection.recv()))


def tell(ended: EndedCommand) -> Sequence[str]:
    while time.process_time() < 4:
        pass
    return ["read"]
