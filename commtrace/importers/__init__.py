"""Importers: one module per format of another program.

Each has one function that reads files and writes a run directory, which all reading commands accept.

>>> from commtrace.importers.kineto import import_kineto
>>> import_kineto([Path("rank-0.json.gz"), Path("rank-1.json.gz")], Path("imported"))       # doctest: +SKIP
"""
