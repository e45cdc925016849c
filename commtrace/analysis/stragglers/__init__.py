"""Find stragglers: one rule for recorded runs and for windows of a running job.

:mod:`normal` compares the work of ranks, :mod:`limits` holds the numbers from which a difference counts.
"""
