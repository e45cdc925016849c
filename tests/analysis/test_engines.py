from __future__ import annotations

from dataclasses import replace

import pytest

from commtrace.analysis.engines import EngineUse, engine_notes, engine_words, engines_used
from commtrace.trace.run import Run
from commtrace.trace.topology import Topology
from tests.factory import make_run, span

NATIVE: Topology = {"engine": {"name": "native", "reason": ""}}
SWITCHED_OFF: Topology = {"engine": {"name": "python", "reason": "switched off"}}
NOT_BUILT: Topology = {"engine": {"name": "python", "reason": "it was not built"}}


def run_of(*topologies: Topology, device: str = "NVIDIA H100 80GB HBM3") -> Run:
    run = make_run({rank: [span("step", 0, 10, step=0)] for rank in range(len(topologies))})
    ranks = {
        rank: replace(run.ranks[rank], topology=topology, metadata=replace(run.ranks[rank].metadata, device=device))
        for rank, topology in enumerate(topologies)
    }
    return replace(run, ranks=ranks)


def test_ranks_are_grouped_by_engine_and_reason() -> None:
    run = run_of(NATIVE, NOT_BUILT, NATIVE, {}, SWITCHED_OFF, NOT_BUILT)

    assert engines_used(run) == (
        EngineUse("native", "", (0, 2)),
        EngineUse("python", "it was not built", (1, 5)),
        EngineUse("python", "switched off", (4,)),
    )


@pytest.mark.parametrize(
    ("topologies", "with_reasons", "without"),
    [
        ([{}], "", ""),
        ([NATIVE, NATIVE], "native", "native"),
        ([NOT_BUILT], "Python (it was not built)", "Python"),
        (
            [NATIVE, NOT_BUILT, SWITCHED_OFF],
            "native on rank 0, Python on rank 1 (it was not built), Python on rank 2 (switched off)",
            "native on rank 0, Python on ranks 1–2",
        ),
    ],
)
def test_engines_in_words(topologies: list[Topology], with_reasons: str, without: str) -> None:
    engines = engines_used(run_of(*topologies))

    assert engine_words(engines) == with_reasons
    assert engine_words(engines, with_reason=False) == without


def test_the_cost_of_the_python_engine_is_told_of_gpus() -> None:
    def notes(*topologies: Topology, device: str) -> list[str]:
        run = run_of(*topologies, device=device)
        return list(engine_notes(engines_used(run), run.ranks.values()))

    [note] = notes(NATIVE, NOT_BUILT, NOT_BUILT, device="NVIDIA H100 80GB HBM3")
    assert note.startswith("The Python engine recorded ranks 1–2: on an H100 it added 55 µs")
    assert note.endswith("(docs/overhead.md). Why not the native one: it was not built.")
    assert notes(NATIVE, device="NVIDIA H100 80GB HBM3") == []
    assert notes(NOT_BUILT, device="cpu") == []
