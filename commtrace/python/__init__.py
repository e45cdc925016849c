"""Give people who read runs from Python the results of the commands: tables, SQL and figures.

>>> run = commtrace.open("commtrace-runs/my-run")  # doctest: +SKIP
"""
