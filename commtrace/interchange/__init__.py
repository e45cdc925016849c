"""The files of other systems: what is read from them, and written for them. Imported only where it is asked for.

>>> from commtrace.interchange.traces.kineto import import_kineto
>>> import_kineto([Path("rank-0.json.gz"), Path("rank-1.json.gz")], Path("imported"))       # doctest: +SKIP
"""
