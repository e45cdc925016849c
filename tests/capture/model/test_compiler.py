"""torch.compile passes by capture's own functions, as it passes by torch's own, which are C++."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from commtrace.capture.model import compiler
from commtrace.capture.tracer import Tracer
from commtrace.recorder import Recorder

early = sys.argv[1] == "early"
if not early:
    import torch._dynamo
tracer = Tracer(Recorder(lambda: []))
uninstall = compiler.install(tracer)
if early:
    assert "torch._dynamo" not in sys.modules, "capture must not import the compiler"
    import torch._dynamo
from torch._dynamo import trace_rules

assert trace_rules.check(Tracer.enter)
assert not trace_rules.check(Recorder.flush), "only capture is passed by"
uninstall()
assert not trace_rules.check(Tracer.enter)
assert tracer.guard.take_messages() == []
"""


def test_its_files_are_skipped_whoever_is_imported_first() -> None:
    for order in ("early", "late"):
        completed = subprocess.run([sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, timeout=120)
        assert completed.returncode == 0, completed.stderr
