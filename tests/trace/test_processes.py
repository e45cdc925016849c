"""What the process of a rank is in: asked of real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commtrace.trace.processes import cpu_ns, process_state
from tests.trace.rows import metadata
from tests.waiting import until


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
def test_a_process_runs_until_it_has_ended() -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = metadata(host=socket.gethostname(), boot_id=boot_id, pid=process.pid, session=time.time_ns() + 10**9)

    until(lambda: process_state(own) == "runs")  # in the kernel while it is read from the disk
    assert process_state(replace(own, boot_id="another")) is None
    assert process_state(replace(own, host="another")) is None
    assert process_state(replace(own, session=1)) == "gone"  # the number belongs to a later process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert process_state(own) == "suspended"
    os.kill(process.pid, signal.SIGCONT)
    process.communicate()
    assert process_state(own) == "gone"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
def test_a_process_that_computes_spends_time_of_the_cpu() -> None:
    before, until = cpu_ns(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert cpu_ns(os.getpid()) >= before + 5e7
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_ns(gone.pid) == 0
