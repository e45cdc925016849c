"""Simulate training jobs with known ranks, hosts, schedules, faults and clock errors.

:func:`synthesize` returns the recording (``.run``) and the truth (``.truth``, JSON); :func:`write` writes a run
directory with ``truth.json``.

>>> from commtrace.synth import FREE, Job, synthesize
>>> job = Job(pp=4, microbatches=8, steps=1, forward_ns=1, backward_ns=2, optimizer_ns=0, data_ns=0,
...           jitter=0.0, end_scatter_ns=0, network=FREE)
>>> synthesize(job).truth["steps"][0]["duration_ns"]            # (m + p − 1)(F + B)
33
"""

from commtrace.synth.faults import Fault
from commtrace.synth.job import FREE, Job, Network, SimulatedClock, random_clocks
from commtrace.synth.synthesis import Synthetic, synthesize, write

__all__ = ["FREE", "Fault", "Job", "Network", "SimulatedClock", "Synthetic", "random_clocks", "synthesize", "write"]
