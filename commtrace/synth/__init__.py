"""Simulated training jobs in which every fact is known.

Synthetic runs measure commtrace's own speed and answers, at sizes that no test machine has. Ranks, hosts, schedules,
faults and clock errors are given, and :class:`Synthetic` holds the truth beside the recording.

>>> from commtrace.synth import FREE, Job, synthesize
>>> job = Job(pp=4, microbatches=8, steps=1, forward_ns=1, backward_ns=2, optimizer_ns=0, data_ns=0,
...           jitter=0.0, end_scatter_ns=0, network=FREE)
>>> synthesize(job).truth["steps"][0]["duration_ns"]            # (m + p − 1)(F + B)
33

:func:`synthesize` gives the spans in memory (``.run`` is a :class:`~commtrace.trace.run.Run`) and the truth
(``.truth``, JSON). :func:`write` writes a run directory as a recorder does, with ``truth.json`` beside the ranks.
"""

from commtrace.synth.clocks import Clock, random_clocks
from commtrace.synth.faults import Fault
from commtrace.synth.job import FREE, Job, Network
from commtrace.synth.synthesis import Synthetic, synthesize, write

__all__ = ["FREE", "Clock", "Fault", "Job", "Network", "Synthetic", "random_clocks", "synthesize", "write"]
