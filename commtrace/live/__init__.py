"""Sum up steps while training runs, for exporters, on the recorder's harvester thread; torch is not imported.

:class:`StepCollector` hands a :class:`StepSummary` of every step to each :class:`StepListener`, the exporters.
"""
