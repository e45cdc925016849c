"""Who is gone when a communication fails, by the files of the ranks of this host."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from commtrace.capture.gone_peers import gone_peers
from tests.trace.rows import mark, metadata, write_rank

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
pytestmark = pytest.mark.skipif(not BOOT_ID.exists(), reason="asks /proc")


def test_a_rank_of_this_host_without_a_process_is_gone_and_one_of_another_host_is_not_known(tmp_path: Path) -> None:
    here = {
        "host": socket.gethostname(), "node": "node0", "boot_id": BOOT_ID.read_text().strip(), "world_size": 5,
        "session": time.time_ns() + 10**9,
    }  # fmt: skip
    no_process = 2**22 + 1
    for rank, told in {
        0: {**here, "pid": os.getpid()},
        1: {**here, "pid": no_process},
        2: {**here, "pid": no_process, "boot_id": "another"},
        3: {**here, "pid": no_process, "run_id": "earlier"},
    }.items():
        write_rank(tmp_path, [mark("end", {})], rank=rank, **told)
    own = metadata(rank=0, local_rank=0, pid=os.getpid(), **here)
    assert gone_peers(tmp_path, own) == [1], "of rank 4 there are no files"
