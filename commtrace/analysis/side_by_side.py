"""Does a few long things at once in threads: numpy on long columns lets other threads go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

_Result = TypeVar("_Result")

_MOST_THREADS: Final = 4
"""Each needs memory for what it makes on the way."""


def side_by_side(function: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]]) -> list[_Result]:
    """``function`` of each of these arguments, in their order, on as many cores as there are, up to four."""
    threads = min(len(arguments), os.cpu_count() or 1, _MOST_THREADS)
    if threads < 2:
        return [function(*own) for own in arguments]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda own: function(*own), arguments))
