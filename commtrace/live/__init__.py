"""Sums up steps while training runs, for exporters: one summary per step and rank.

Everything here runs on the recorder's harvester thread, never on a training thread. :class:`StepCollector` is a sink
of the recorder: it gathers the rows of a step and hands a :class:`StepSummary` with them to every
:class:`StepListener`: the exporters. Nothing here imports torch.
"""
