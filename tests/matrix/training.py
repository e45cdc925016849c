"""Trains six small steps with one framework on CPUs under torch.profiler, whatever version of torch there is.

    torchrun --nproc-per-node 2 tests/matrix/training.py KIND FOLDER

Each rank leaves ``profiler-RANK.json`` in the folder. Nothing here is bound to a version: what a version lacks is
looked for under its earlier name, and an older one that has neither says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commtrace.auto  # first: before torch and before every framework

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.matrix import STEPS

WIDTH = 16


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def train(wrapped: Any) -> None:  # torch declares what fully_shard returns as no module
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(STEPS):
        wrapped(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def python() -> None:
    """Functions of torch.distributed and functional collectives, in steps that the script marks."""
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    following, previous = (rank + 1) % size, (rank - 1) % size
    for number in range(STEPS):
        with commtrace.step(number):
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4, dtype=torch.bfloat16), group=group, async_op=True).wait()
            dist.broadcast(torch.ones(5), 0)
            dist.all_gather([torch.ones(6) for _ in range(size)], torch.ones(6))
            dist.all_gather_into_tensor(torch.ones(7 * size), torch.ones(7))
            dist.all_to_all_single(torch.ones(8 * size), torch.ones(8 * size))
            operations = [
                dist.P2POp(dist.isend, torch.ones(9), following),
                dist.P2POp(dist.irecv, torch.ones(9), previous),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            dist.barrier()
            functional.wait_tensor(functional.all_reduce(torch.ones(10), "sum", group))


def ddp() -> None:
    train(nn.parallel.DistributedDataParallel(model()))


def fsdp() -> None:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = model()
    for layer in (whole[0], whole[2]):
        fully_shard(layer, mesh=mesh)
    train(fully_shard(whole, mesh=mesh))


def pipelining() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(WIDTH, WIDTH)
    # Versions before 2.6 ask for an example of the input.
    example: dict[str, Any] = {} if torch.__version__ >= "2.6" else {"input_args": (torch.ones(1, WIDTH),)}
    stage = PipelineStage(module, rank, size, torch.device("cpu"), **example)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batch = torch.ones(4, WIDTH)
    for _ in range(STEPS):
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        optimizer.step()
        optimizer.zero_grad()


def megatron() -> None:
    """examples/train_megatron_gpt.py; it joins and leaves the job itself."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import train_megatron_gpt

    sys.argv = ["train_megatron_gpt.py", "--pipeline", "2", "--iterations", str(STEPS), "--microbatches", "4"]
    train_megatron_gpt.main()


def deepspeed() -> None:
    """ZeRO 2 of two micro-steps for each step."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # collectives of inference, compiled at first use
    whole = model()
    engine, *_ = deepspeed.initialize(
        model=whole,
        model_parameters=list(whole.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    for _ in range(2 * STEPS):
        engine.backward(engine(torch.ones(4, WIDTH)).sum())
        engine.step()


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens for a language model."""

    def __len__(self) -> int:
        return 2 * 2 * STEPS  # ranks, samples of a batch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


def transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=str(Path(sys.argv[2]) / "trainer"), max_steps=STEPS, per_device_train_batch_size=2,
        report_to=[], save_strategy="no", use_cpu=True, ddp_backend="gloo", disable_tqdm=True,
    )  # fmt: skip
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Numbers()).train()


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    whole = model()
    whole, optimizer = accelerator.prepare(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    for _ in range(STEPS):
        accelerator.backward(whole(torch.ones(4, WIDTH)).sum())
        optimizer.step()
        optimizer.zero_grad()


def lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.whole = model()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return self.whole(batch["input_ids"].float().repeat(1, 2)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=sys.argv[2],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Numbers(), batch_size=2))


KINDS: dict[str, Callable[[], None]] = {
    "python": python, "ddp": ddp, "fsdp": fsdp, "pipelining": pipelining, "megatron": megatron, "deepspeed": deepspeed,
    "transformers": transformers, "accelerate": accelerate, "lightning": lightning,
}  # fmt: skip
JOIN_BY_THEMSELVES = ("megatron", "transformers", "accelerate", "lightning")


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if kind not in JOIN_BY_THEMSELVES:
        dist.init_process_group("gloo")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        KINDS[kind]()
    profiler.export_chrome_trace(str(folder / f"profiler-{os.environ['RANK']}.json"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
