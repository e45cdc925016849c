"""Pure functions from a recorded run to what it means; nothing here imports torch.

The chain is: align the hosts' clocks, match communications across ranks, partition each rank's steps, summarise.

>>> from commtrace.trace.files.reader import load_run
>>> run = load_run("commtrace-runs/my-run")                     # doctest: +SKIP
>>> aligned = align.apply(run, align.align(run))                # doctest: +SKIP
>>> matches = match.match(aligned)                              # doctest: +SKIP
>>> partition.partition(aligned, matches)                       # doctest: +SKIP
"""
