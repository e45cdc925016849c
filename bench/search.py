"""How long ``commtrace search`` takes: a simulated run, and the layouts of its GPUs, for several sizes of memory.

    python bench/search.py --layers 40 --global-batch 1024

Little memory is the hardest case: the search must look at many fast layouts that do not fit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from commtrace.analysis.chain import analyse
from commtrace.analysis.prediction.predict import StepModel
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model
from commtrace.planning.search.costs import measure_costs
from commtrace.planning.search.layouts import search_layouts
from commtrace.planning.search.prediction import Predictor
from commtrace.synth import Job, synthesize, write

LAYOUT = Layout(tp=2, pp=4, dp=4, microbatches=8, distributed_optimizer=True, flash_attention=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--global-batch", type=int, default=1024)
    parser.add_argument("--gib", type=float, nargs="+", default=[3, 10, 40, 80])
    arguments = parser.parse_args()
    model = Model(layers=arguments.layers, hidden=4096, heads=32, sequence=4096, vocabulary=32_000)
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        job = Job(tp=2, pp=4, dp=4, microbatches=8, layers=model.layers, steps=5)
        write(synthesize(job), run)
        began, used = time.perf_counter(), time.process_time()
        predictor = Predictor.like(measure_costs(StepModel.observed(analyse(run)), model, LAYOUT))
        report("read and measure the run", began, used)
    for gib in arguments.gib:
        began, used = time.perf_counter(), time.process_time()
        found = search_layouts(predictor, LAYOUT.world_size, round(gib * (1 << 30)), arguments.global_batch, top=10)
        report(f"search {gib:g} GiB", began, used, f"{found.layouts:,} layouts, {found.too_large:,} too large")


def report(what: str, began: float, used: float, more: str = "") -> None:
    print(f"{what:<26} {time.perf_counter() - began:6.2f} s   {time.process_time() - used:6.2f} s of a core   {more}")


if __name__ == "__main__":
    main()
