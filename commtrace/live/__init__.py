"""Sums up steps while training runs, for exporters, on the recorder's harvester thread; imports no torch.

:class:`StepCollector` hands a :class:`StepSummary` of every step to each :class:`StepListener`, the exporters.
"""
