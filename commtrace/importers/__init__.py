"""Import files of other programs, one format per module, into a run directory that all reading commands accept.

>>> from commtrace.importers.kineto import import_kineto
>>> import_kineto([Path("rank-0.json.gz"), Path("rank-1.json.gz")], Path("imported"))       # doctest: +SKIP
"""
