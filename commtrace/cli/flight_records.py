"""The dumps of torch's flight recorder that are given to ``commtrace doctor``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commtrace.analysis.hangs.flight_calls import FlightCall
from commtrace.errors import ImportFileError
from commtrace.importers.flight_recorder import read_flight_record

_ENDS_WITH_RANK: Final = re.compile(r"\d+(\.(pkl|pickle|bin|json))?$")


def read_flight_calls(paths: Sequence[Path]) -> list[FlightCall]:
    """Return the collectives in these dumps.

    Args:
        paths: dumps, directories of dumps, or what the names of dumps begin with, such as /tmp/nccl_trace_rank_.

    Raises:
        ImportFileError: there is none, or one cannot be read.
    """
    return [
        FlightCall(
            record.rank,
            entry.group.ranks,
            entry.group.ordinal,
            entry.operation,
            entry.seq,
            entry.state,
            entry.frames,
        )
        for record in (read_flight_record(path) for given in paths for path in _dumps(given))
        for entry in record.entries
        if entry.group is not None and not entry.is_p2p
    ]


def _dumps(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    folder, begin = (given, "") if given.is_dir() else (given.parent, given.name)
    listing = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [
        path for path in listing if path.name.startswith(begin) and path.is_file() and _ENDS_WITH_RANK.search(path.name)
    ]
    if not found:
        raise ImportFileError(
            f"{given}: no dumps of the flight recorder. Give the files that TORCH_NCCL_DEBUG_INFO_TEMP_FILE names, "
            "what their names begin with, or their directory; the names end with the rank."
        )
    return found
