"""A small mixture of experts, two of its ranks expert-parallel, trained by Megatron: one microbatch at a time, or two.

With ``--combined``, Megatron's overlap of expert-parallel communication (combined 1F1B). It is written for CUDA's
streams; streams and events that do nothing stand in for them, so that everything runs in the order of its launches.

torchrun --nproc-per-node 2 tests/e2e/programs/megatron_experts.py --combined
torchrun --nproc-per-node 4 tests/e2e/programs/megatron_experts.py --combined --interleaved

With ``--interleaved``, two stages of two chunks each, with as many layers in every chunk.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron_cpu import use_cpu_for_cuda

import commtrace.auto  # noqa: F401
from tests.e2e.programs.megatron_parts import layers_of_torch, mean_loss

LAYERS, HIDDEN, SEQUENCE, VOCABULARY, MICROBATCHES, ITERATIONS = 2, 16, 8, 64, 4, 2


class Stream:
    """Of CUDA, in name only."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.cuda_stream = 0

    def wait_event(self, _event: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def wait_stream(self, _stream: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


class Event:
    """Of CUDA, in name only."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        return None

    def record(self, _stream: Any = None) -> None:
        return None

    def wait(self, _stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None


def without_streams() -> None:
    """Stand-ins for what Megatron asks ``torch.cuda`` for."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    current = Stream()
    cuda.current_stream = lambda device=None: current
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None
    cuda.nvtx.range = lambda *arguments, **options: contextlib.nullcontext()
    tensors: Any = torch.Tensor
    tensors.record_stream = lambda tensor, stream: None
    token_dispatcher.maybe_move_tensor_to_cpu = _moved
    moe_utils.te_general_gemm = None  # which 0.16.1 forgets to define where there is no Transformer Engine


def _moved(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's takes what is not on a GPU for moved already, numpy or not."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--combined", action="store_true")
    parser.add_argument("--interleaved", action="store_true")
    options = parser.parse_args()
    stages, chunks = (2, 2) if options.interleaved else (1, None)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    use_cpu_for_cuda()
    without_streams()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks, expert_model_parallel_size=2
    )
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS * stages * (chunks or 1),
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        batch_p2p_comm=not chunks,
        overlap_p2p_comm=bool(chunks),
        microbatch_group_size_per_vp_stage=stages,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=2,
        overlap_moe_expert_parallel_comm=options.combined,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        deallocate_pipeline_outputs=False,
    )
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    models = [
        DistributedDataParallel(config, ddp_config, gpt(config, chunk if chunks else None).bfloat16())
        for chunk in range(chunks or 1)
    ]
    config.no_sync_func = [model.no_sync for model in models] if chunks else models[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    for _ in range(ITERATIONS):
        for model in models:
            model.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter([]) for _ in models] if chunks else iter([]),
            model=models if chunks else models[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        print(f"loss {[float(loss).hex() for loss in losses]}\n", end="", flush=True)
    dist.destroy_process_group()


def gpt(config: TransformerConfig, chunk: int | None) -> GPTModel:
    layers = layers_of_torch(config, chunk)
    position = {"ignore_virtual": chunk is None, "vp_stage": chunk}
    return GPTModel(
        config,
        layers,
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**position),
        post_process=parallel_state.is_pipeline_last_stage(**position),
        vp_stage=chunk,
    )


def forward_step(_data: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    tokens = torch.arange(SEQUENCE)[None] % VOCABULARY
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    forward = model.build_schedule_plan if return_schedule_plan else model
    return forward(tokens, torch.arange(SEQUENCE)[None], future, labels=tokens), mean_loss


if __name__ == "__main__":
    main()
