"""Importers of other programs' recordings: one module per format.

Every module has one function that reads files and writes a run directory in commtrace's own layout, which all reading
commands then take.

>>> from commtrace.importers.kineto import import_kineto
>>> import_kineto([Path("rank-0.json.gz"), Path("rank-1.json.gz")], Path("imported"))       # doctest: +SKIP
"""
