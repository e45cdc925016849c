"""Pure functions from a recorded run to its analysis; nothing here imports torch.

The chain is: align the hosts' clocks, match communications across ranks, partition each rank's steps, summarise.

>>> from commtrace.trace.files.reader import load_run
>>> run = load_run("commtrace-runs/my-run")                     # doctest: +SKIP
>>> aligned = align.apply(run, align.align(run))                # doctest: +SKIP
>>> partition.partition(aligned, match.match(aligned))          # doctest: +SKIP
"""
