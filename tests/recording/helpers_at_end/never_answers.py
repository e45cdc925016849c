"""Lives on without a word."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection


def main(descriptor: int, parent: int) -> None:
    connection = Connection(descriptor)  # open for as long as this process lives
    connection.recv()
    time.sleep(60)
