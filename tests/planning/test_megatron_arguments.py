"""Megatron-LM's arguments, as people write them."""

from __future__ import annotations

import shlex

import pytest

from commtrace.errors import ConfigurationError
from commtrace.planning.layout import Layout, PlannedJob
from commtrace.planning.megatron_arguments import parse_megatron_command
from commtrace.planning.model import Model

GPT = (
    "torchrun --nnodes 2 --nproc-per-node=8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 "
    "--global-batch-size 512 --vocab-size 50257 --bf16 --lr 1e-4 --data-path my-corpus "
)


def parse(more: str = "", gpus: int | None = None) -> PlannedJob:
    return parse_megatron_command(shlex.split(GPT + more), gpus)


def test_a_command_line() -> None:
    job = parse("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-flash-attn")

    assert job.model == Model(
        layers=24, hidden=2048, heads=16, sequence=2048, vocabulary=50_432, tokenizer_vocabulary=50_257
    )
    assert job.layout == Layout(
        tp=2, pp=2, dp=4, microbatch=4, microbatches=32, sequence_parallel=True, flash_attention=True,
        expert_dispatcher="other",
    )  # fmt: skip
    assert job.ignored == ("--lr", "--data-path")
    assert job.notes == ()


def test_a_llama() -> None:
    job = parse(
        "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-query-groups 8 "
        "--group-query-attention --untie-embeddings-and-output-weights --use-distributed-optimizer "
        "--recompute-activations --attention-backend unfused"
    )

    assert job.model == Model(
        layers=24, hidden=2048, heads=16, sequence=2048, vocabulary=50_304, tokenizer_vocabulary=50_257, ffn=5440,
        query_groups=8, gated=True, linear_bias=False, qkv_bias=False, normalization="RMSNorm", positions="rope",
        tied_embeddings=False,
    )  # fmt: skip
    assert (job.layout.recompute, job.layout.distributed_optimizer, job.layout.dp) == ("selective", True, 16)
    assert not job.layout.flash_attention


def test_experts() -> None:
    job = parse(
        "--num-experts 8 --moe-router-topk 1 --moe-ffn-hidden-size 1024 --moe-layer-freq 2 "
        "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"
    )

    assert (job.model.experts, job.model.experts_per_token, job.model.expert_ffn, job.model.moe_every) == (
        8,
        1,
        1024,
        2,
    )
    assert (job.layout.ep, job.layout.expert_dispatcher) == (4, "all_to_all")


@pytest.mark.parametrize(
    ("more", "chunks"),
    [("", 1), ("--num-layers-per-virtual-pipeline-stage 3", 4), ("--num-virtual-stages-per-pipeline-rank 2", 2)],
)
def test_chunks(more: str, chunks: int) -> None:
    assert parse(f"--pipeline-model-parallel-size 2 {more}").layout.chunks == chunks


@pytest.mark.parametrize(
    ("words", "layout_bytes"),
    [
        ("--bf16", (2, 4, 12)),
        ("--bf16 --grad-reduce-in-bf16", (2, 2, 16)),
        ("--fp16", (2, 2, 16)),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", (2, 4, 12)),
        ("", (4, 4, 8)),
    ],
)
def test_precisions(words: str, layout_bytes: tuple[int, int, int]) -> None:
    layout = parse_megatron_command(shlex.split(GPT.replace("--bf16", words))).layout

    assert (layout.parameter_bytes, layout.gradient_bytes, layout.optimizer_bytes) == layout_bytes


def test_context_parallelism() -> None:
    kinds = [parse(f"--context-parallel-size 2 --cp-comm-type {name}").layout for name in ("p2p", "a2a", "allgather")]

    assert [layout.cp_communication for layout in kinds] == ["ring", "all_to_all", "other"]
    assert {layout.cp for layout in kinds} == {2}


def test_assumptions_are_named() -> None:
    job = parse(
        "--mtp-num-layers 1 --optimizer sgd --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 2"
    )

    assert job.ignored == ("--lr", "--data-path")
    assert job.notes == (
        "The numbers depend on --mtp-num-layers, which a plan does not understand yet.",
        "Transformer Engine is taken to choose flash or fused attention.",
        "Full recomputation is counted layer by layer (--recompute-method uniform, 1 layer).",
        "The optimizer's states are those of Adam, not of sgd.",
    )


@pytest.mark.parametrize(
    "words",
    [
        "--tp-comm-overlap", "--use-tp-pp-dp-mapping", "--calculate-per-token-loss", "--hybrid-layer-pattern M*",
        "--moe-pad-expert-input-to-capacity", "--distribute-saved-activations", "--yaml-cfg x.yaml",
        "--fine-grained-activation-offloading", "--deepspeed", "--microbatch-group-size-per-virtual-pipeline-stage 4",
    ],
)  # fmt: skip
def test_an_argument_that_changes_the_numbers_is_not_only_ignored(words: str) -> None:
    job = parse(words)

    assert job.ignored == ("--lr", "--data-path")
    assert f"The numbers depend on {words.split()[0]}, which a plan does not understand yet." in job.notes


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--tensor-model-parallel-siz 8", "--tensor-model-parallel-size"),
        ("--tensor_model_parallel_size 8", "--tensor-model-parallel-size"),
        ("--pipeline-parallel-size=2", "--pipeline-model-parallel-size"),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
        ("--mtp-num-layer 1", "--mtp-num-layers"),
    ],
)
def test_a_misspelt_argument_is_not_only_ignored(words: str, meant: str) -> None:
    job = parse(words)

    assert job.ignored == ("--lr", "--data-path")
    name = words.replace("=", " ").split()[0]
    assert f"{name} is not known, and left out: is {meant} meant?" in job.notes


@pytest.mark.parametrize("words", ["--no-bias-swiglu-fusion", "--eval-micro-batch-size 1", "--tp-comm-overlap-cfg x"])
def test_an_argument_of_megatron_s_own_that_looks_like_another_is_ignored(words: str) -> None:
    assert parse(words).ignored == ("--lr", "--data-path", words.split()[0])


@pytest.mark.parametrize("words", ["--cuda-graph-impl none", "--cross-entropy-fusion-impl=native"])
def test_a_default_that_is_written_out_changes_nothing(words: str) -> None:
    job = parse(words)

    assert job.ignored == ("--lr", "--data-path")
    assert not any("The numbers depend on" in note for note in job.notes)


@pytest.mark.parametrize("words", ["--cuda-graph-impl transformer_engine", "--cross-entropy-fusion-impl=te"])
def test_another_value_changes_the_numbers(words: str) -> None:
    option = words.replace("=", " ").split()[0]

    assert f"The numbers depend on {option}, which a plan does not understand yet." in parse(words).notes


@pytest.mark.parametrize(
    "launcher",
    [
        "srun -n 16 python", "mpirun -np 16 python", "/usr/bin/srun --ntasks=16 python3", "sudo srun -n 16 python",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 srun -n 16 python", "env NCCL_DEBUG=INFO srun -n 16 python",
        "mpiexec.hydra -n 16 python", "deepspeed --num_gpus 16", "accelerate launch --num_processes 16",
        "python -m accelerate.commands.launch --num_processes 16",
    ],
)  # fmt: skip
def test_ranks_of_other_launchers_must_be_given(launcher: str) -> None:
    words = [*launcher.split(), *shlex.split(GPT)[4:]]

    with pytest.raises(ConfigurationError, match=f"the ranks that {launcher} starts are not read .* give --gpus"):
        parse_megatron_command(words)
    assert parse_megatron_command(words, 16).layout.dp == 16


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("", 1), ("python", 1), ("/usr/bin/python3.11 -u", 1), ("CUDA_VISIBLE_DEVICES=3 python3", 1),
        ("env CUDA_DEVICE_MAX_CONNECTIONS=1 python", 1), ("srun -N 2 torchrun --nnodes 2 --nproc-per-node 8", 16),
        ("OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc_per_node 4", 4),
        ("commtrace run -- /opt/bin/torchrun --nproc-per-node=2", 2),
    ],
)  # fmt: skip
def test_torchrun_says_how_many_ranks_there_are_and_python_is_one(launcher: str, ranks: int) -> None:
    assert parse_megatron_command([*launcher.split(), *shlex.split(GPT)[4:]]).layout.dp == ranks


def test_dropout_of_0_is_none() -> None:
    job = parse("--hidden-dropout 0 --attention-dropout 0.0")

    assert (job.model.hidden_dropout, job.model.attention_dropout) == (False, False)
    assert (parse().model.hidden_dropout, parse().model.attention_dropout) == (True, True)


def test_a_batch_that_grows_is_planned_at_its_end() -> None:
    job = parse("--rampup-batch-size 32 32 5000")

    assert job.layout.microbatches == 512 // (4 * 16)
    assert job.ignored == ("--lr", "--data-path")
    assert "The global batch is the last one of --rampup-batch-size." in job.notes


def test_older_and_other_names_of_positions_and_gates() -> None:
    job = parse("--use-rotary-position-embeddings --quick-geglu")

    assert (job.model.positions, job.model.gated, job.model.ffn) == ("rope", True, 4 * 2048)
    assert job.ignored == ("--lr", "--data-path")


def test_a_padded_vocabulary_can_be_given() -> None:
    command = GPT.replace("--vocab-size 50257", "--padded-vocab-size 50304")
    model = parse_megatron_command(shlex.split(command)).model

    assert (model.vocabulary, model.tokenizer_vocabulary) == (50_304, 0)


def test_recomputed_activations_are_selective_whatever_the_granularity() -> None:
    assert parse("--recompute-granularity full --recompute-activations").layout.recompute == "selective"


def test_ranks_can_be_given() -> None:
    assert parse(gpus=4).layout.dp == 4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun", "no script that ends with .py"),
        (
            "deepspeed --num_gpus 8 train.py --deepspeed ds_config.json",
            "YAML file, {model: .*, deepspeed: ds_config.json}",
        ),
        (GPT.replace("--num-layers 24", ""), "pretrain_gpt.py: the following arguments are required: --num-layers"),
        (GPT.replace("--vocab-size 50257", ""), "a tokenizer, which a plan does not read: add --vocab-size"),
        (GPT.replace("--hidden-size 2048", "--hidden-size wide"), "--hidden-size: invalid int value: 'wide'"),
        (GPT.replace("--nnodes 2", "--nnodes 1:4"), "do not say how many ranks there are: give --gpus"),
        (GPT + "--tensor-model-parallel-size 3", "16 ranks cannot be divided by 3"),
        (GPT.replace("512", "500"), "500 sequences cannot be divided by 64"),
        (GPT + "--position-embedding-type relative", "relative is not understood: only learned_absolute"),
        (GPT + "--moe-layer-freq [0,1]", "as a number only"),
    ],
)
def test_a_command_that_cannot_be_planned_says_why(command: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("[", r"\[")):
        parse_megatron_command(shlex.split(command))


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("--num-layers 10 --decoder-first-pipeline-num-layers 4", (4, 0)),
        ("--num-layers 11 --account-for-embedding-in-pipeline-split", (5, 6)),
        ("--num-layers 10 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", (5, 5)),
    ],
)
def test_uneven_stages(words: str, ends: tuple[int, int]) -> None:
    job = parse_megatron_command(
        shlex.split(
            "torchrun --nproc-per-node 2 x.py --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99 "
            f"--max-position-embeddings 32 --micro-batch-size 1 --pipeline-model-parallel-size 2 --clip-grad 0 {words}"
        )
    )

    assert (job.layout.first_stage_layers, job.layout.last_stage_layers) == ends
    assert not job.layout.clip_gradients
    assert sum(job.layout.stage_sizes(job.model)) == job.model.layers
