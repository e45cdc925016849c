"""Looks for the layout in which a model trains fastest, with times that were measured and memory that is computed.

>>> from commtrace.planning.pipeline_time import ChunkTimes, pipeline_ns
>>> uneven = [[ChunkTimes(10, 20)], [ChunkTimes(15, 25)]]
>>> pipeline_ns(uneven, microbatches=4)
190
"""
