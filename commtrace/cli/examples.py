"""Two examples of every command, as its help shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[str, str]]] = {
    "run": (
        "commtrace run -- torchrun --nproc-per-node 8 train.py",
        "commtrace run -o runs/gpt --modules depth=2 -- python train.py",
    ),
    "summary": ("commtrace summary", "commtrace summary commtrace-runs/gpt --steps 10:20 --details"),
    "report": (
        "commtrace report",
        "commtrace report commtrace-runs/gpt -o after.html --against commtrace-runs/old",
    ),
    "view": ("commtrace view", "commtrace view commtrace-runs/gpt --port 8000"),
    "top": ("commtrace top", "commtrace top commtrace-runs/gpt --once"),
    "doctor": ("commtrace doctor", "commtrace doctor commtrace-runs/latest --all-ranks"),
    "straggler": ("commtrace straggler", "commtrace straggler commtrace-runs/gpt --baseline commtrace-runs/healthy"),
    "pipeline": ("commtrace pipeline", "commtrace pipeline commtrace-runs/gpt --steps 10:20"),
    "whatif": (
        "commtrace whatif commtrace-runs/gpt --without-slow-rank all",
        "commtrace whatif commtrace-runs/gpt --microbatches 16 --bandwidth dp=2x",
    ),
    "bandwidth": ("commtrace bandwidth", "commtrace bandwidth commtrace-runs/gpt --by size"),
    "sql": (
        'commtrace sql commtrace-runs/gpt "SELECT rank, avg(bubble_ns) FROM steps GROUP BY rank"',
        'commtrace sql commtrace-runs/gpt "SELECT * FROM findings"',
    ),
    "list": ("commtrace list", "commtrace list /shared/runs --json"),
    "hosts": ("commtrace hosts", "commtrace hosts /shared/runs --all"),
    "compare": (
        "commtrace compare commtrace-runs/before commtrace-runs/after",
        "commtrace compare commtrace-runs/a commtrace-runs/b --before commtrace-runs/a2 --threshold 3",
    ),
    "preflight": (
        "torchrun --nproc-per-node 8 -m commtrace preflight",
        "torchrun --nproc-per-node 8 -m commtrace preflight --json",
    ),
    "bench overhead": (
        "commtrace bench overhead -- torchrun --nproc-per-node 8 train.py",
        "commtrace bench overhead --pairs 5 -- python train.py",
    ),
    "bench collectives": (
        "torchrun --nproc-per-node 8 -m commtrace bench collectives --expect 400Gbit/s",
        "torchrun --nproc-per-node 8 -m commtrace bench collectives -o baseline.json",
    ),
    "bench replay": (
        "torchrun --nproc-per-node 8 -m commtrace bench replay commtrace-runs/gpt",
        "torchrun --nproc-per-node 8 -m commtrace bench replay commtrace-runs/gpt --json",
    ),
    "bench matmul": ("commtrace bench matmul", "commtrace bench matmul --json"),
    "trigger": ("commtrace trigger", "commtrace trigger commtrace-runs/gpt --num-steps 10"),
    "monitor": (
        "commtrace monitor node0:9411",
        "commtrace monitor node0:9411 --webhook https://hooks.example.org/training",
    ),
    "metrics": ("commtrace metrics commtrace-runs/gpt", "commtrace metrics commtrace-runs/gpt --json"),
    "export": (
        "commtrace export commtrace-runs/gpt -o trace.json",
        "commtrace export commtrace-runs/gpt --format parquet -o tables",
    ),
    "plot": (
        "commtrace plot timeline commtrace-runs/gpt --step 12",
        "commtrace plot heat-map commtrace-runs/gpt -o map.svg",
    ),
    "import": (
        "commtrace import kineto traces/ -o commtrace-runs/imported",
        "commtrace import flight-recorder /tmp/nccl_trace_rank_ -o commtrace-runs/imported",
    ),
    "merge": (
        "commtrace merge node0/gpt node1/gpt -o commtrace-runs/gpt",
        "commtrace merge node*/gpt -o commtrace-runs/gpt",
    ),
    "plan": (
        "commtrace plan --memory 80 -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32",
        "commtrace plan job.yaml --memory 80",
    ),
    "search": (
        "commtrace search commtrace-runs/gpt --memory 80",
        "commtrace search commtrace-runs/gpt job.yaml --memory 80 --gpus 64",
    ),
    "synth": (
        "commtrace synth -o commtrace-runs/made --pp 4 --dp 2",
        "commtrace synth -o commtrace-runs/slow --dp 4 --fault slow-rank=1:1.3",
    ),
}
