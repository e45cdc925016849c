"""One iteration of the Megatron model of the reference counts in each of some layouts, recorded as a run of its own.

The model: 4 layers, hidden size 64, 4 heads, 32 tokens in bf16, a vocabulary of 128, learned positions, tied
embeddings, LayerNorm, Megatron's DDP with the distributed optimizer's gradient reduction in fp32, nothing overlapped.

Arguments: a folder, and for each run NAME:OPTIONS, such as "tp2_sp:--tp 2 --sp".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commtrace

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron_cpu import use_cpu_for_cuda

from tests.e2e.programs.megatron_parts import layers_of_torch, mean_loss

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 4, 64, 4, 32, 128


def main(folder: Path, runs: list[str]) -> None:
    commtrace.stop()  # the example, of which parts are used, has started it
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    use_cpu_for_cuda()
    for run in runs:
        name, _, options = run.partition(":")
        commtrace.start(commtrace.Config(dir=str(folder / name)))
        iterate(parsed(options.split()))
        commtrace.stop()
    dist.destroy_process_group()


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--mb", type=int, default=4)
    parser.add_argument("--sp", action="store_true")
    return parser.parse_args(arguments)


def iterate(options: argparse.Namespace) -> None:
    parallel_state.initialize_model_parallel(options.tp, options.pp)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        sequence_parallel=options.sp,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        deallocate_pipeline_outputs=False,
    )
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        gpt(config).bfloat16(),
    )
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([]),
        model=model,
        num_microbatches=options.mb,
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    model.start_param_sync(force_sync=True)
    parallel_state.destroy_model_parallel()


def gpt(config: TransformerConfig) -> GPTModel:
    layers = layers_of_torch(config)
    return GPTModel(
        config,
        layers,
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )


def forward_step(_data: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE))
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens, torch.arange(SEQUENCE)[None], future, labels=tokens), mean_loss


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
