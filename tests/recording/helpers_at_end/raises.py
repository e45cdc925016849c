"""Ends with an exception before it answers."""

from __future__ import annotations


def main(descriptor: int, parent: int) -> None:
    raise RuntimeError("on purpose")
