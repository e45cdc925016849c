"""A Megatron-LM command line as a model and a layout, with Megatron-LM's own arguments and defaults."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence, Set
from difflib import get_close_matches
from pathlib import PurePath
from typing import Final, Literal, NoReturn

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout, PlannedJob
from commtrace.planning.model import Model, padded

_NOT_PLANNED: Final = {
    "--attention-output-gate", "--calculate-per-token-loss", "--cpu-offloading", "--ddp-num-buckets",
    "--ddp-pad-buckets-for-high-nccl-busbw", "--deepspeed", "--deepspeed-config", "--deepspeed_config",
    "--defer-embedding-wgrad-compute", "--delay-wgrad-compute",
    "--distribute-saved-activations", "--enable-cuda-graph", "--experimental-attention-variant",
    "--external-cuda-graph", "--fine-grained-activation-offloading", "--fp32-residual-connection", "--fp4-format",
    "--fp4-param-gather", "--fp8-format", "--fp8-param-gather", "--freeze-all-layers",
    "--heterogeneous-layers-config-path", "--hierarchical-context-parallel-sizes", "--hybrid-context-parallel",
    "--hybrid-layer-pattern", "--hybrid-override-pattern", "--is-hybrid-model", "--log-num-zeros-in-grad",
    "--log-params-norm", "--microbatch-group-size-per-virtual-pipeline-stage",
    "--moe-expert-capacity-factor", "--moe-latent-size", "--moe-layer-recompute",
    "--moe-pad-expert-input-to-capacity", "--moe-shared-expert-intermediate-size", "--mtp-num-layers",
    "--multi-latent-attention", "--optimizer-cpu-offload",
    "--overlap-moe-expert-parallel-comm", "--overlap-param-gather-with-optimizer-step",
    "--pipeline-model-parallel-layout", "--qk-layernorm", "--recompute-modules",
    "--reuse-grad-buf-for-mxfp8-param-ag", "--spec", "--tp-comm-overlap", "--use-checkpoint-args",
    "--use-custom-fsdp", "--use-layer-wise-distributed-optimizer", "--use-megatron-fsdp",
    "--use-mp-args-from-checkpoint-args", "--use-precision-aware-optimizer", "--use-torch-fsdp2",
    "--use-tp-pp-dp-mapping", "--variable-seq-lengths", "--yaml-cfg", "--zero-stage",
}  # fmt: skip
"""Arguments on which the numbers depend, but which are not understood."""


_DEFAULTS: Final = {
    "--cross-entropy-fusion-impl": "native",
    "--cuda-graph-impl": "none",
    "--data-parallel-sharding-strategy": "no_shard",
    "--main-grads-dtype": "fp32",
    "--num-distributed-optimizer-instances": "1",
}
"""Likewise, unless they have these values, which are Megatron-LM's defaults."""

_ALIKE: Final = 0.85
"""Above this ratio of difflib's a name is taken for a misspelt one."""

_MEGATRONS_OWN: Final = {
    "--eval-global-batch-size", "--eval-micro-batch-size", "--main-params-dtype", "--moe-expert-rank-capacity-factor",
    "--moe-router-dtype", "--moe-shared-expert-glu-interleave-size", "--mtp-hybrid-override-pattern",
    "--tp-comm-overlap-cfg",
}  # fmt: skip
"""Megatron-LM's arguments that look like one of those above, beside its ``--no-…`` and ``--disable-…``."""

_DEEPSPEED: Final = {"--deepspeed", "--deepspeed_config", "--deepspeed-config"}
_TORCHRUN: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_GROWING_BATCHES: Final = ("--rampup-batch-size", "--step-batch-size-schedule")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self.prog}: {message}")


def parse_megatron_command(command: Sequence[str], gpus: int | None = None) -> PlannedJob:
    """Return the model and layout of ``torchrun … pretrain_gpt.py --tensor-model-parallel-size 2 …``.

    Args:
        command: The command. Arguments before the script are the launcher's.
        gpus: Ranks of the job, if the launcher's arguments do not give them.

    Raises:
        ConfigurationError: a size is missing or impossible.
    """
    scripts = [index for index, word in enumerate(command) if word.endswith(".py")]
    if not scripts:
        raise ConfigurationError("the command has no script that ends with .py, such as pretrain_gpt.py")
    script = scripts[0]
    if _is_without_sizes(command[script:]):
        raise ConfigurationError(
            "the sizes of a model that DeepSpeed trains are not in its command: write them into a YAML file, "
            "{model: {layers: …}, layout: {dp: 8}, deepspeed: ds_config.json}, and plan that"
        )
    parsed, unknown = _megatron_parser(PurePath(command[script]).name).parse_known_args(list(command[script + 1 :]))
    world_size = _launched_ranks(command[:script]) if gpus is None else gpus
    ignored = tuple(dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("--")))
    misspelt = dict(_misspelt(ignored, {f"--{name.replace('_', '-')}" for name in vars(parsed)}))
    model = _model(parsed)
    return PlannedJob(
        model=model,
        layout=_layout(parsed, model, world_size),
        ignored=tuple(word for word in ignored if word not in _NOT_PLANNED and word not in misspelt),
        notes=(*misspelt.values(), *_not_planned(ignored, parsed), *_assumed(parsed)),
    )


def _is_without_sizes(words: Sequence[str]) -> bool:
    """Return whether a script is given a configuration of DeepSpeed, but not the arguments of Megatron-LM."""
    names = {word.partition("=")[0] for word in words}
    return "--num-layers" not in names and not names.isdisjoint(_DEEPSPEED)


def _misspelt(names: Sequence[str], known: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield each argument that is nearly one that a plan knows, and a sentence.

    Megatron-LM refuses what its own parser and the script's do not know; it takes no abbreviations:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/training/arguments.py#L120
    """
    for name in names:
        if name in _NOT_PLANNED | _MEGATRONS_OWN or name.startswith(("--no-", "--disable-")):
            continue
        near = get_close_matches(name, sorted(known | _NOT_PLANNED), n=1, cutoff=_ALIKE)
        if near:
            yield name, f"{name} is not known, and left out: is {near[0]} meant?"


def _launched_ranks(words: Sequence[str]) -> int:
    """Return the ranks that torchrun starts, or the one of plain Python; other launchers say it in too many ways."""
    launchers = [index for index, word in enumerate(words) if PurePath(word).name in _TORCHRUN]
    if not launchers:
        program = next((word for word in words if "=" not in word and word != "env"), "python")
        if not re.fullmatch(r"python[0-9.]*", PurePath(program).name) or "-m" in words:
            raise ConfigurationError(
                f"the ranks that {shlex.join(words)} starts are not read from the command: give --gpus"
            )
        return 1
    parser = _Parser(prog="torchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    launched, _ = parser.parse_known_args(list(words[launchers[-1] + 1 :]))
    if not (launched.nnodes.isdecimal() and launched.nproc_per_node.isdecimal()):
        raise ConfigurationError(
            f"--nnodes {launched.nnodes} --nproc-per-node {launched.nproc_per_node} do not say how many ranks there "
            "are: give --gpus"
        )
    return int(launched.nnodes) * int(launched.nproc_per_node)


def _megatron_parser(script: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of Megatron-LM on which a plan depends, and their defaults there."""
    parser = _Parser(prog=script, add_help=False, allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in (
        "ffn-hidden-size", "kv-channels", "max-position-embeddings", "global-batch-size", "num-experts",
        "moe-ffn-hidden-size", "expert-tensor-parallel-size", "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank", "ddp-bucket-size", "recompute-num-layers",
        "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "vocab-size", "padded-vocab-size",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in (
        "num-query-groups", "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
        "expert-model-parallel-size",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in (
        "swiglu", "quick-geglu", "use-rotary-position-embeddings", "disable-bias-linear", "add-qkv-bias",
        "untie-embeddings-and-output-weights", "group-query-attention", "sequence-parallel",
        "use-distributed-optimizer", "recompute-activations", "bf16", "fp16", "use-flash-attn",
        "overlap-grad-reduce", "cross-entropy-loss-fusion", "accumulate-allreduce-grads-in-fp32",
        "grad-reduce-in-bf16", "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--moe-router-topk", type=int, default=2)
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--normalization", default="LayerNorm", choices=("LayerNorm", "RMSNorm"))
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", default="uniform")
    parser.add_argument("--cp-comm-type", default="p2p", nargs="+")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--hidden-dropout", type=float, default=0.1)
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    for name, default in _DEFAULTS.items():
        parser.add_argument(name, default=default)
    for name in _GROWING_BATCHES:
        parser.add_argument(name, nargs="+", default=())
    return parser


def _model(parsed: argparse.Namespace) -> Model:
    hidden = parsed.hidden_size
    if not parsed.moe_layer_freq.isdecimal():
        raise ConfigurationError("--moe-layer-freq is understood as a number only, such as 2 for every second layer")
    position_types: dict[str, Literal["learned", "rope", "none"]] = {
        "learned_absolute": "learned",
        "rope": "rope",
        "yarn": "rope",
        "none": "none",
    }
    position_type = "rope" if parsed.use_rotary_position_embeddings else parsed.position_embedding_type
    if position_type not in position_types:
        raise ConfigurationError(
            f"--position-embedding-type {position_type} is not understood: only {', '.join(position_types)}"
        )
    if not (parsed.vocab_size or parsed.padded_vocab_size):
        raise ConfigurationError(
            "the size of the vocabulary is that of a tokenizer, which a plan does not read: add --vocab-size and the "
            "number of its entries to the command, such as --vocab-size 32000"
        )
    unit = parsed.make_vocab_size_divisible_by * parsed.tensor_model_parallel_size
    return Model(
        layers=parsed.num_layers,
        hidden=hidden,
        heads=parsed.num_attention_heads,
        sequence=parsed.seq_length,
        vocabulary=parsed.padded_vocab_size or padded(parsed.vocab_size, unit),
        tokenizer_vocabulary=parsed.vocab_size,
        ffn=parsed.ffn_hidden_size or (8 * hidden // 3 // 64 * 64 if parsed.swiglu else 4 * hidden),
        query_groups=parsed.num_query_groups if parsed.group_query_attention else 0,
        head_size=parsed.kv_channels,
        gated=parsed.swiglu or parsed.quick_geglu,
        linear_bias=not parsed.disable_bias_linear,
        qkv_bias=parsed.add_qkv_bias or not parsed.disable_bias_linear,
        normalization=parsed.normalization,
        positions=position_types[position_type],
        max_positions=parsed.max_position_embeddings,
        tied_embeddings=not parsed.untie_embeddings_and_output_weights,
        experts=parsed.num_experts,
        experts_per_token=parsed.moe_router_topk if parsed.num_experts else 2,
        expert_ffn=parsed.moe_ffn_hidden_size,
        moe_every=int(parsed.moe_layer_freq),
        hidden_dropout=parsed.hidden_dropout > 0,
        attention_dropout=parsed.attention_dropout > 0,
    )


def _layout(parsed: argparse.Namespace, model: Model, world_size: int) -> Layout:
    tp, pp, cp = (
        parsed.tensor_model_parallel_size,
        parsed.pipeline_model_parallel_size,
        parsed.context_parallel_size,
    )
    dp = _divided(world_size, tp * pp * cp, "ranks", "tp · pp · cp; --gpus gives the number of ranks")
    global_batch = parsed.global_batch_size or parsed.micro_batch_size * dp
    granularity: Literal["none", "selective", "full"] = parsed.recompute_granularity or "none"
    is_fp32 = not (parsed.bf16 or parsed.fp16)
    accumulates_in_fp32 = is_fp32 or parsed.bf16 or parsed.accumulate_allreduce_grads_in_fp32
    has_fp32_gradients = accumulates_in_fp32 and not parsed.grad_reduce_in_bf16
    first_stage_layers, last_stage_layers = _end_stages(parsed)
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=parsed.expert_model_parallel_size,
        expert_tp=parsed.expert_tensor_parallel_size,
        chunks=_chunks(parsed, model),
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        microbatch=parsed.micro_batch_size,
        microbatches=_divided(global_batch, parsed.micro_batch_size * dp, "sequences", "the microbatches of all ranks"),
        sequence_parallel=parsed.sequence_parallel and tp > 1,  # Megatron-LM turns it off as well
        distributed_optimizer=parsed.use_distributed_optimizer,
        recompute="selective" if parsed.recompute_activations else granularity,
        flash_attention=_has_flash_attention(parsed),
        fused_cross_entropy=parsed.cross_entropy_loss_fusion,
        cp_communication=_cp_communication(parsed.cp_comm_type),
        expert_dispatcher="all_to_all" if parsed.moe_token_dispatcher_type == "alltoall" else "other",
        overlap_gradients=parsed.overlap_grad_reduce,
        bucket_elements=parsed.ddp_bucket_size,
        parameter_bytes=4 if is_fp32 else 2,
        gradient_bytes=4 if has_fp32_gradients else 2,
        # without a copy of fp32 parameters; with one of the gradients, where those are not in fp32
        optimizer_bytes=8 if is_fp32 else 12 if has_fp32_gradients else 16,
        clip_gradients=parsed.clip_grad > 0,
    )


def _end_stages(parsed: argparse.Namespace) -> tuple[int, int]:
    """Return the layers of the first and the last stage; 0 where they are those of the others."""
    embedding = int(parsed.account_for_embedding_in_pipeline_split)
    loss = int(parsed.account_for_loss_in_pipeline_split)
    if not (embedding or loss):
        return parsed.decoder_first_pipeline_num_layers, parsed.decoder_last_pipeline_num_layers
    what = "layers, the embedding and the loss counted as they are asked to"
    each = _divided(parsed.num_layers + embedding + loss, parsed.pipeline_model_parallel_size, what, "the stages")
    return each - embedding, each - loss


def _divided(whole: int, part: int, what: str, by_what: str) -> int:
    if part < 1 or whole < 1 or whole % part:
        raise ConfigurationError(f"{whole} {what} cannot be divided by {part}, {by_what}")
    return whole // part


def _chunks(parsed: argparse.Namespace, model: Model) -> int:
    if parsed.num_virtual_stages_per_pipeline_rank:
        return int(parsed.num_virtual_stages_per_pipeline_rank)
    if not parsed.num_layers_per_virtual_pipeline_stage:
        return 1
    layers_of_chunks = parsed.num_layers_per_virtual_pipeline_stage * parsed.pipeline_model_parallel_size
    return _divided(model.layers, layers_of_chunks, "layers", "the layers of one chunk on every stage")


def _cp_communication(given: str | list[str]) -> Literal["ring", "all_to_all", "other"]:
    kinds: dict[str, Literal["ring", "all_to_all"]] = {"p2p": "ring", "a2a": "all_to_all"}
    name = given if isinstance(given, str) else given[0] if len(given) == 1 else ""
    return kinds.get(name, "other")


def _has_flash_attention(parsed: argparse.Namespace) -> bool:
    if parsed.use_flash_attn or parsed.attention_backend in ("flash", "fused"):
        return True
    is_half = parsed.bf16 or parsed.fp16
    return bool(parsed.attention_backend == "auto" and parsed.transformer_impl == "transformer_engine" and is_half)


def _not_planned(names: Sequence[str], parsed: argparse.Namespace) -> tuple[str, ...]:
    unplanned = [name for name in names if name in _NOT_PLANNED]
    unplanned += [name for name, default in _DEFAULTS.items() if _value(parsed, name) != default]
    return (
        (f"The numbers depend on {', '.join(unplanned)}, which a plan does not understand yet.",) if unplanned else ()
    )


def _value(parsed: argparse.Namespace, name: str) -> object:
    return vars(parsed)[name.removeprefix("--").replace("-", "_")]


def _assumed(parsed: argparse.Namespace) -> tuple[str, ...]:
    notes = []
    if _has_flash_attention(parsed) and not parsed.use_flash_attn and parsed.attention_backend == "auto":
        notes.append("Transformer Engine is taken to choose flash or fused attention.")
    if parsed.recompute_granularity == "full" and (
        parsed.recompute_num_layers > 1 or parsed.recompute_method != "uniform"
    ):
        notes.append("Full recomputation is counted layer by layer (--recompute-method uniform, 1 layer).")
    growing = [name for name in _GROWING_BATCHES if _value(parsed, name)]
    notes += [f"The global batch is the last one of {name}." for name in growing]
    if parsed.optimizer != "adam":
        notes.append(f"The optimizer's states are those of Adam, not of {parsed.optimizer}.")
    return tuple(notes)
