"""Sums up steps while training runs, for exporters: one summary per step and rank.

:class:`StepCollector` is a sink of the recorder: it gathers the rows of a step and hands them with a
:class:`StepSummary` to every :class:`StepListener`, the exporters. All of this runs on the recorder's harvester thread,
never on a training thread, and imports no torch.
"""
