"""Three iterations of the DeepSpeed model of the reference counts at some ZeRO stages, each recorded as its own run.

The model: 3 layers of width 32 with a feed-forward width of 88, a vocabulary of 160, 48,096 parameters in bf16. Two
micro-steps per iteration; buckets and prefetching of 20,000 elements. Every phase of the program is a span of its own,
``it0.mb1.bwd`` and the like; what comes before the first is the initialisation.

Arguments: the stages, and with ``--runs FOLDER`` where to record; without it, nothing is recorded. Stage ``3-released``
keeps no parameters from a forward to its backward.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch.nn import functional

import commtrace

WIDTH, FEED_FORWARD, VOCABULARY, LAYERS, TOKENS = 32, 88, 160, 3, 16
ITERATIONS, ACCUMULATION = 3, 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(WIDTH, bias=False)
        self.query, self.key, self.value, self.mix = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = torch.nn.LayerNorm(WIDTH, bias=False)
        self.gate = torch.nn.Linear(WIDTH, FEED_FORWARD, bias=False)
        self.down = torch.nn.Linear(FEED_FORWARD, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, FEED_FORWARD, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(hidden)
        scores = self.query(normed) @ self.key(normed).transpose(-1, -2)
        hidden = hidden + self.mix(scores.softmax(-1) @ self.value(normed))
        normed = self.norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("zero", nargs="+", choices=["0", "1", "2", "3", "3-released"])
    parser.add_argument("--runs", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    # Collectives of inference, which would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in options.zero:
        if options.runs is not None:
            commtrace.start(commtrace.Config(dir=str(options.runs / f"zero{stage}")))
        print(f"rank {dist.get_rank()} zero {stage} computed {train(stage)}\n", end="")
        commtrace.stop()
    dist.destroy_process_group()


def train(zero_stage: str) -> str:
    """Return a digest of the losses."""
    torch.manual_seed(dist.get_rank())
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(zero_stage))
    digest = hashlib.sha256()
    for iteration in range(ITERATIONS):
        for micro_step in range(ACCUMULATION):
            place = f"it{iteration}.mb{micro_step}"
            tokens = torch.randint(VOCABULARY, (1, TOKENS))
            with commtrace.span(f"{place}.fwd"):
                loss = engine(tokens)
            with commtrace.span(f"{place}.bwd"):
                engine.backward(loss)
            with commtrace.span(f"{place}.step"):
                engine.step()
            digest.update(loss.detach().numpy().tobytes())
    return digest.hexdigest()


def configuration(zero_stage: str) -> dict[str, Any]:
    stage, _, released = zero_stage.partition("-")
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": int(stage),
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "use_multi_rank_bucket_allreduce": True,
            "reduce_bucket_size": 20_000,
            "allgather_bucket_size": 50_000,
            "stage3_prefetch_bucket_size": 20_000,
            "stage3_param_persistence_threshold": 100,
            "stage3_max_live_parameters": 0 if released else 1_000_000,
            "stage3_max_reuse_distance": 0 if released else 1_000_000_000,
        },
    }


if __name__ == "__main__":
    main()
