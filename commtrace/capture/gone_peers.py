"""Which other ranks of this host are gone, asked in the moment in which a communication has failed.

A launcher kills the ranks that are left a tenth of a second after the first has died: then all look alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa

from commtrace.trace import schema
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.processes import GONE, process_state
from commtrace.trace.writer import rank_directory, segment_paths

_MOST_PEERS: Final = 64
"""Of one host."""


def gone_peers(directory: Path, own: RankMetadata) -> list[int]:
    """Return the ranks of this launch and this host whose process is gone, by what their files say of it.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is none of ours.
    """
    first = own.rank - own.local_rank
    gone = []
    for rank in range(first, min(first + _MOST_PEERS, own.world_size)):
        files = rank_directory(directory, rank)
        if rank == own.rank or not files.is_dir():
            continue
        for path in segment_paths(files)[-1:]:
            peer = _metadata(path)
            is_ours = (peer.run_id, peer.attempt, peer.node) == (own.run_id, own.attempt, own.node)
            if is_ours and process_state(peer) == GONE:
                gone.append(rank)
    return gone


def _metadata(path: Path) -> RankMetadata:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return RankMetadata.from_json((stream.schema.metadata or {})[schema.METADATA_KEY])
