"""The example that trains with megatron-core, with all of its ranks on the first GPU.

torchrun --nproc-per-node 4 tests/gpu/programs/train_megatron.py --tensor 2 --pipeline 2
torchrun --nproc-per-node 4 tests/gpu/programs/train_megatron.py --profile OUTPUT 3:7 --tensor 2 --pipeline 2

With --profile, iterations 3 to 6, counted from 0, run under torch.profiler, and their kernels go to
OUTPUT/kernels-RANK.csv.gz.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.e2e.launch import REPOSITORY
from tests.gpu.kernels import all_kernels, write_kernels
from tests.gpu.programs.one_gpu import share_one_gpu


def main() -> None:
    share_one_gpu()
    os.environ["LOCAL_RANK"] = "0"
    if "--profile" in sys.argv:
        position = sys.argv.index("--profile")
        output, iterations = sys.argv[position + 1 : position + 3]
        del sys.argv[position : position + 3]
        profile_iterations(Path(output), *map(int, iterations.split(":")))
    script = REPOSITORY / "examples" / "train_megatron_gpt.py"
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def profile_iterations(output: Path, first: int, last: int) -> None:
    """Have iterations ``first`` to ``last`` - 1 run under torch.profiler; the call of a schedule is an iteration."""
    import megatron.core.pipeline_parallel as pipelines

    original: Callable[[], Callable[..., Any]] = pipelines.get_forward_backward_func
    profiler = torch.profiler.profile()
    iterations = 0

    def get_forward_backward_func(*arguments: Any) -> Callable[..., Any]:
        schedule = original(*arguments)

        def profiled(*arguments: Any, **options: Any) -> Any:
            nonlocal iterations
            if iterations == first:
                profiler.start()
            elif iterations == last:
                stop_and_write(profiler, output)
            iterations += 1
            return schedule(*arguments, **options)

        return profiled

    pipelines.get_forward_backward_func = get_forward_backward_func


def stop_and_write(profiler: torch.profiler.profile, output: Path) -> None:
    """Write the kernels that were seen."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.stop()
    rank = os.environ["RANK"]
    trace = output / f"trace-{rank}.json"
    profiler.export_chrome_trace(str(trace))
    write_kernels(all_kernels(trace), output / f"kernels-{rank}.csv.gz")
    trace.unlink()


if __name__ == "__main__":
    main()
