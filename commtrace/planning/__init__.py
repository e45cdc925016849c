"""Computes, before a job runs, what it will hold and send: formulas only, nothing is measured or started.

>>> from commtrace.planning.layout import Layout
>>> from commtrace.planning.model import Model
>>> from commtrace.planning.plan import make_plan
>>> model = Model(layers=24, hidden=2048, heads=16, sequence=2048, vocabulary=50_304)
>>> plan = make_plan(model, Layout(tp=2, dp=4, microbatch=4, microbatches=8))
>>> plan.parameters
1315819520
"""
