"""Who is slow: one rule for recorded runs and for windows of a run that goes on.

:mod:`normal` compares the work of ranks, :mod:`limits` holds the numbers from which a difference counts.
"""
