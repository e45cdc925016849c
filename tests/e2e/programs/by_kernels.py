"""Runs another program as on a torch without hooks of process groups: kernels in the dispatcher see what C++ issues.

python tests/e2e/programs/by_kernels.py PROGRAM ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys

from commtrace.capture.collectives import cpp_communication

cpp_communication.torch_has_hooks = lambda: False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
