"""Answers at once."""

from __future__ import annotations

from multiprocessing.connection import Connection


def main(descriptor: int, parent: int) -> None:
    connection = Connection(descriptor)
    directory, _, _ = connection.recv()
    connection.send([f"commtrace: Run gpt in {directory}"])
