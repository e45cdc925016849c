"""The stages of the GPU hour, which bench/gpu_hour.py runs one after the other, each in a process of its own.

    python -m tests.gpu.stages.call_costs OUTPUT

Each answers some of the ``QUESTIONS``, with a line of ``OUTPUT/answers.jsonl`` for each answer as soon as it has it: a
stage that is ended keeps what it found. Without a GPU a stage is a rehearsal: it runs under gloo with tiny sizes, and
its answers say so.
"""

from __future__ import annotations

from typing import Final

QUESTIONS: Final = (
    "the engine loads and records",
    "both engines record the same",
    "cost of a call: all_reduce",
    "cost of a call: all_reduce, async + wait",
    "cost of a call: broadcast",
    "cost of a call: all_gather_into_tensor",
    "cost of a call: reduce_scatter_tensor",
    "cost of a span, two marks",
    "cost of a mark and of its parts",
    "threads of commtrace",
    "starts and ends against kernels",
    "brackets against kernels",
    "barriers against kernels",
    "results and memory",
    "synchronisations",
    "dropped spans",
    "a step that keeps the GPU busy",
    "a step that is bound by launches",
    "launches while marks are waited for",
    "marks while another thread launches",
    "growth of the event pool",
    "elapsed time to an earlier event",
    "queries while a graph is captured",
    "leads of marks",
    "end of the process",
    "Megatron-core: exposed communication",
    "Megatron-core: results",
    "aborted group",
    "graph capture",
    "replays of graphs",
    "events in graphs",
    "cost of marks in graphs",
    "replays without a synchronisation",
    "stamps against kernels",
)
"""In the order of the table."""
