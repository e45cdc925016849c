"""A model whose costs are known, and what predicts times with them."""

from __future__ import annotations

from dataclasses import replace

from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.pipeline_time import ChunkTimes
from commtrace.planning.search.costs import PartTimes, RunCosts
from commtrace.planning.search.links import Bandwidth, Links, RoleReach
from commtrace.planning.search.prediction import Predictor

MODEL = Model(layers=8, hidden=1024, heads=16, sequence=1024, vocabulary=50_304)
LAYOUT = Layout(tp=2, pp=4, dp=1, microbatch=2, microbatches=4, flash_attention=True)
WITHIN, BETWEEN = Bandwidth(100.0, 1e8), Bandwidth(20.0, 1e8)
COSTS = RunCosts(
    model=MODEL,
    layout=LAYOUT,
    gpus_per_node=4,
    parts=PartTimes(ChunkTimes(1_000_000, 2_000_000), ChunkTimes(50_000, 100_000), ChunkTimes(900_000, 1_500_000)),
    links=Links({RoleReach("tp", False): WITHIN, RoleReach("pp", True): BETWEEN}, {}),
    optimizer_ns=500_000,
    step_ns=60_000_000,
    modelled_ns=60_000_000,
    deviation_ns=0,
    num_steps=4,
)
GIB = 1 << 30


def exact(scatter: float) -> Predictor:
    """Return a predictor of steps that scatter. The run has the bandwidth of all roles that it needs."""
    links = Links({**COSTS.links.bandwidths, RoleReach("embedding", True): BETWEEN}, {})
    step_ns = Predictor.like(replace(COSTS, links=links)).reproduced.step_ns
    deviation_ns = scatter * step_ns  # two standard errors of four steps
    return Predictor.like(
        replace(COSTS, links=links, step_ns=step_ns, modelled_ns=step_ns, deviation_ns=deviation_ns, num_steps=4)
    )
