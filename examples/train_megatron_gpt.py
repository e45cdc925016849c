"""Trains a small GPT with megatron-core: its model, schedules, data parallelism and distributed optimizer.

On a laptop (gloo, no GPU), and on a machine with four GPUs (NCCL), the command is the same:

    torchrun --nproc-per-node 4 examples/train_megatron_gpt.py --pipeline 2

Data parallelism takes the ranks that tensor and pipeline parallelism leave. The one line that this script has for
commtrace is ``import commtrace.auto``; then ``commtrace summary commtrace-runs`` shows where the time went.
"""

from __future__ import annotations

import argparse
import inspect
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron_cpu import use_cpu_for_cuda

import commtrace.auto  # noqa: F401

VOCABULARY = 256
# That of megatron-core 0.12 needs Transformer Engine, which this example does without.
DISTRIBUTED_OPTIMIZER = not megatron.core.__version__.startswith("0.12.")


def main() -> None:
    options = parse_options()
    device = start_distributed(options)
    config = transformer_config(options, device)
    chunks = build_model(options, config, device)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=DISTRIBUTED_OPTIMIZER,
            **known_to(OptimizerConfig, overlap_param_gather=options.overlap),
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync

    forward_backward = get_forward_backward_func()
    data = [synthetic_batches(options, device) for _ in chunks]  # the chunks of a rank see the same batches
    last_rank = dist.get_rank() == dist.get_world_size() - 1
    for iteration in range(options.iterations):
        start = time.perf_counter()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=partial(forward_step, options),
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=options.microbatches,
            seq_length=options.sequence,
            micro_batch_size=options.microbatch_size,
            forward_only=False,
        )
        _, gradient_norm, _ = optimizer.step()
        if last_rank:  # only the last pipeline stage knows the loss
            loss = torch.stack(losses).mean().item()
            milliseconds = 1e3 * (time.perf_counter() - start)
            print(f"iteration {iteration:3d}  loss {loss:.4f}  {milliseconds:6.1f} ms", flush=True)
            if options.print_losses:
                with options.print_losses.open("a") as file:
                    file.write(f"{float(loss).hex()} {float(gradient_norm).hex()}\n")
    dist.destroy_process_group()


def start_distributed(options: argparse.Namespace) -> torch.device:
    """Join the job, divide its ranks among the kinds of parallelism, and seed them."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        use_cpu_for_cuda()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline,
    )
    if options.data and options.data != parallel_state.get_data_parallel_world_size():
        sizes = f"{options.tensor} x {options.pipeline} x {options.data}"
        raise SystemExit(f"{dist.get_world_size()} ranks are not tensor x pipeline x data = {sizes}")
    seed = options.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return device


def transformer_config(options: argparse.Namespace, device: torch.device) -> TransformerConfig:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline,
        sequence_parallel=options.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # gloo may still be sending a tensor when Megatron would free it; on a CUDA stream the order is kept.
        deallocate_pipeline_outputs=device.type == "cuda",
        # With two stages both neighbours are the same rank: only unbatched transfers keep the two directions apart.
        batch_p2p_comm=not options.virtual_pipeline,
        overlap_p2p_comm=bool(options.virtual_pipeline),
        use_cpu_initialization=device.type == "cpu",
        # Fusions that need Apex or Transformer Engine, which this example does without:
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )


class LayerNorm(torch.nn.LayerNorm):
    """torch's layer norm with what Megatron needs to know about it under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_model(
    options: argparse.Namespace, config: TransformerConfig, device: torch.device
) -> list[DistributedDataParallel]:
    """The model chunks of this rank: one, or as many as virtual pipeline stages."""
    chunks = []
    for index in range(options.virtual_pipeline or 1):
        virtual_stage = index if options.virtual_pipeline else None
        if virtual_stage is not None:  # where megatron-core 0.12 looks for it
            parallel_state.set_virtual_pipeline_model_parallel_rank(virtual_stage)
        layers = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, **known_to(get_gpt_decoder_block_spec, vp_stage=virtual_stage)
        )
        layers.layer_norm = LayerNorm
        for layer in layers.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LayerNorm
        position = known_to(
            parallel_state.is_pipeline_first_stage, ignore_virtual=virtual_stage is None, vp_stage=virtual_stage
        )
        model = GPTModel(
            config,
            layers,
            vocab_size=VOCABULARY,
            max_sequence_length=options.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**position),
            post_process=parallel_state.is_pipeline_last_stage(**position),
            share_embeddings_and_output_weights=True,
            **known_to(GPTModel, vp_stage=virtual_stage),
        ).to(device, config.params_dtype)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=DISTRIBUTED_OPTIMIZER,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=options.overlap,
            overlap_param_gather=options.overlap and DISTRIBUTED_OPTIMIZER,
            bucket_size=100_000,
        )
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=index > 0))
    return chunks


def known_to(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that this version of Megatron has: 0.12 and 0.13 lack some of the later ones."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def synthetic_batches(options: argparse.Namespace, device: torch.device) -> Iterator[torch.Tensor]:
    """Counting sequences such as 5 8 11 14 …: easy to learn, and different for every data-parallel rank."""
    generator = torch.Generator().manual_seed(options.seed + 1000 * parallel_state.get_data_parallel_rank())
    shape = (options.microbatch_size, 1)
    while True:
        start = torch.randint(VOCABULARY, shape, generator=generator)
        stride = torch.randint(1, 4, shape, generator=generator)
        yield ((start + stride * torch.arange(options.sequence + 1)) % VOCABULARY).to(device)


def forward_step(options: argparse.Namespace, data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    """The forward of one microbatch; Megatron's schedule calls it."""
    tokens = next(data)
    if dist.get_rank() == options.slow_rank:
        time.sleep(options.slow_ms / 1e3)  # on purpose: the straggler of the demonstration
    length = options.sequence
    positions = torch.arange(length, device=tokens.device).expand(len(tokens), length)
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens[:, :-1].contiguous(), positions, future, labels=tokens[:, 1:].contiguous())
    return output, mean_loss


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = output.float().mean()
    return loss, loss.detach().clone()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT with megatron-core, on CPU or GPU.")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--data", type=int, help="data-parallel ranks: follows from the others, given to be checked")
    parser.add_argument("--virtual-pipeline", type=int, help="model chunks per rank, for the interleaved schedule")
    parser.add_argument("--sequence-parallel", action="store_true", help="with tensor parallelism")
    parser.add_argument("--overlap", action="store_true", help="data-parallel communication beside the computation")
    sizes = {"microbatches": 8, "microbatch-size": 1, "iterations": 24, "layers": 4, "hidden": 128, "sequence": 64}
    for name, default in {**sizes, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--slow-rank", type=int, help="a rank that sleeps in every forward")
    parser.add_argument("--slow-ms", type=float, default=30.0, help="for so long (default 30)")
    parser.add_argument("--print-losses", type=Path, metavar="FILE", help="append loss and gradient norm, bit for bit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
