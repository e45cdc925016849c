"""Predict layouts of a real Megatron-core job (gloo) from one recorded layout, then really run each of them.

    chrt -r 5 python bench/search_real.py                 # two ranks that compute, about ten minutes
    chrt -r 5 python bench/search_real.py --ranks 4       # four ranks whose work is sleep, about fifteen minutes

--baseline FILE predicts with a file of ``commtrace bench collectives``; with --keep, the same runs are judged again.

Both print a table of bench/RESULTS.md. With two ranks, layers multiply real matrices, one core for each. Four ranks
have no four cores here, so that a layer sleeps in proportion to its tokens, divided by tp; what it sends and the
gradients are real either way. Layouts take turns: each round trains all of them for some steps, and each is measured by
its job with a clock of its own, without commtrace's spans. Recording is on in all of them, so that they compare.

The first layout of every round is the one from which the others of that round are predicted, with ``commtrace search``.
Predicted and measured are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from commtrace.planning.search.reliability import ORDER_HELD, PairsInOrder

GLOBAL_BATCH: Final = 8
LAYERS: Final = 8
WARM_UP: Final = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """A layout that is run; the field's names are those of a layout in ``commtrace search --json``."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1
    first_stage_layers: int = 0
    last_stage_layers: int = 0
    microbatch: int = 1
    recompute: str = "none"

    @property
    def microbatches(self) -> int:
        return GLOBAL_BATCH // (self.dp * self.microbatch)

    def is_of(self, layout: Mapping[str, object]) -> bool:
        """Return whether this is a layout that the search printed."""
        return all(layout[name] == value for name, value in asdict(self).items() if name != "name")


SETTINGS: Final = {
    2: (
        Setting("pp 2", pp=2),
        Setting("pp 2, layers 5 + 3", pp=2, first_stage_layers=5, last_stage_layers=3),
        Setting("pp 2, layers 3 + 5", pp=2, first_stage_layers=3, last_stage_layers=5),
        Setting("pp 2, 2 chunks", pp=2, chunks=2),
        Setting("pp 2, microbatches of 2", pp=2, microbatch=2),
        Setting("pp 2, full recomputation", pp=2, recompute="full"),
        Setting("dp 2", dp=2),
        Setting("tp 2", tp=2),
    ),
    4: (
        Setting("pp 2, dp 2", pp=2, dp=2),
        Setting("pp 2, dp 2, layers 5 + 3", pp=2, dp=2, first_stage_layers=5, last_stage_layers=3),
        Setting("pp 2, dp 2, 2 chunks", pp=2, dp=2, chunks=2),
        Setting("pp 2, dp 2, microbatches of 2", pp=2, dp=2, microbatch=2),
        Setting("pp 4", pp=4),
        Setting("pp 4, 2 chunks", pp=4, chunks=2),
        Setting("dp 4", dp=4),
        Setting("tp 2, pp 2", tp=2, pp=2),
        Setting("tp 2, dp 2", tp=2, dp=2),
    ),
}
"""By number of ranks; the first one is the recorded one."""


class Sizes(NamedTuple):
    """The model, and how long its layers sleep: ns of a token in a forward; a backward takes twice as long."""

    hidden: int
    sequence: int
    vocabulary: int
    sleep_ns: int


SIZES: Final = {2: Sizes(256, 128, 4096, 0), 4: Sizes(128, 16, 512, 400_000)}


# The job


def train(place: Path, index: int, steps: int) -> None:
    """Train one layout on this rank, recorded."""
    import commtrace

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron_cpu import use_cpu_for_cuda

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    use_cpu_for_cuda()
    # recomputation keeps the state of the device's random numbers: there is no device, and nothing is dropped
    random: Any = megatron_random
    random._get_cuda_rng_state = lambda *_arguments, **_options: None
    random._set_cuda_rng_state = lambda *_arguments, **_options: None
    ranks = dist.get_world_size()
    commtrace.start(commtrace.Config(dir=str(place)))
    ends = _train(SETTINGS[ranks][index], SIZES[ranks], steps)
    commtrace.stop()
    if dist.get_rank() == 0:
        place.with_suffix(".json").write_text(json.dumps(ends))
    dist.destroy_process_group()


def _train(setting: Setting, sizes: Sizes, steps: int) -> list[float]:
    """Return when each step ended."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    virtual = setting.chunks if setting.chunks > 1 else None
    parallel_state.initialize_model_parallel(setting.tp, setting.pp, virtual)
    torch.manual_seed(1)
    uniform = {"recompute_method": "uniform", "recompute_num_layers": 1} if setting.recompute == "full" else {}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=sizes.hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=setting.tp,
        pipeline_model_parallel_size=setting.pp,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=setting.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=setting.last_stage_layers or None,
        recompute_granularity=None if setting.recompute == "none" else setting.recompute,
        **uniform,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=False,  # gloo may still be sending them
        batch_p2p_comm=not virtual,
        overlap_p2p_comm=bool(virtual),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunks = [
        DistributedDataParallel(
            config, ddp, _gpt(config, sizes, index if virtual else None), disable_bucketing=index > 0
        )
        for index in range(setting.chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-4, params_dtype=torch.float32, use_distributed_optimizer=True), chunks
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if virtual else chunks[0].no_sync
    forward_backward = get_forward_backward_func()
    ends = []
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=_forward_step(setting, sizes),
            data_iterator=[iter(()) for _ in chunks] if virtual else iter(()),
            model=chunks if virtual else chunks[0],
            num_microbatches=setting.microbatches,
            seq_length=sizes.sequence,
            micro_batch_size=setting.microbatch,
            forward_only=False,
        )
        optimizer.step()
        ends.append(time.perf_counter())
    return ends


def _gpt(config: Any, sizes: Sizes, chunk: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from train_megatron_gpt import LayerNorm

    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=chunk)
    layers.layer_norm = LayerNorm
    for layer in layers.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LayerNorm
        if sizes.sleep_ns:
            layer.module = _sleeping(sizes)
    position = {"ignore_virtual": chunk is None, "vp_stage": chunk}
    return GPTModel(
        config,
        layers,
        sizes.vocabulary,
        sizes.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**position),
        post_process=parallel_state.is_pipeline_last_stage(**position),
        vp_stage=chunk,
        share_embeddings_and_output_weights=False,
    )


def _sleeping(sizes: Sizes) -> Any:
    """Return a transformer layer that sleeps as long as its share of the tokens takes."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: Any, seconds: float) -> Any:
            context.seconds = seconds
            time.sleep(seconds)
            return values.clone()

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            time.sleep(2 * context.seconds)
            return gradients[0], None

    asleep: Any = Sleep

    class SleepingLayer(TransformerLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Any, *arguments: Any, **options: Any) -> Any:
            tokens = hidden_states.shape[0] * hidden_states.shape[1] / self.config.tensor_model_parallel_size
            return super().forward(asleep.apply(hidden_states, tokens * sizes.sleep_ns / 1e9), *arguments, **options)

    return SleepingLayer


def _forward_step(setting: Setting, sizes: Sizes) -> Callable[..., Any]:
    import torch

    shape = (setting.microbatch, sizes.sequence)
    positions = torch.arange(sizes.sequence).expand(shape)
    future = torch.ones(1, 1, sizes.sequence, sizes.sequence, dtype=torch.bool).triu(1)

    def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = output.float().mean()
        return loss, loss.detach()

    def forward_step(_data: Any, model: Any) -> tuple[Any, Any]:
        tokens = torch.randint(sizes.vocabulary, shape)
        return model(tokens, positions, future, labels=tokens), mean_loss

    return forward_step


# What was said, and what it took


class Row(NamedTuple):
    """A layout: predicted and measured, ms, medians over the rounds."""

    setting: Setting
    predicted_ms: float
    measured_ms: float
    scatter: float  # largest measured round over the smallest, minus 1
    assumed: tuple[str, ...]
    kind: str  # the last of its kinds of change

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def judge(folder: Path, ranks: int, rounds: int, baseline: Path | None) -> list[Row]:
    """Predict every layout of each round from the first one, beside what it took."""
    settings = SETTINGS[ranks]
    predicted: dict[Setting, list[float]] = {setting: [] for setting in settings}
    measured: dict[Setting, list[float]] = {setting: [] for setting in settings}
    assumed: dict[Setting, tuple[str, ...]] = {}
    kinds: dict[Setting, str] = {}
    for number in range(rounds):
        command = [sys.executable, "-m", "commtrace", "search", str(folder / f"{number}-0"), "--json"]
        command += ["--memory", "1000", "--top", "100000", "--steps", f"{WARM_UP}:1000000"]
        command += ["--baseline", str(baseline)] if baseline else []
        completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if completed.returncode:
            raise SystemExit(completed.stderr)
        answer = json.loads(completed.stdout)
        told = [*answer["best"], *answer["candidates"]]
        for index, setting in enumerate(settings):
            one = next(one for one in told if setting.is_of(one["layout"]))
            predicted[setting].append(one["step_ns"] / 1e6)
            assumed[setting] = tuple(one["assumed"])
            kinds[setting] = one["changes"][-1]
            ends = json.loads((folder / f"{number}-{index}.json").read_text())[WARM_UP - 1 :]
            measured[setting].append(1e3 * (ends[-1] - ends[0]) / (len(ends) - 1))
    return [
        Row(
            setting,
            median(predicted[setting]),
            median(measured[setting]),
            max(measured[setting]) / min(measured[setting]) - 1,
            assumed[setting],
            kinds[setting],
        )
        for setting in settings
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown, the layout that was measured as the fastest first."""
    lines = [
        "| layout | predicted, ms | measured, ms | error | between rounds | assumed | kind of change |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.measured_ms):
        name = f"{row.setting.name} (recorded)" if row is rows[0] else row.setting.name
        lines.append(
            f"| {name} | {row.predicted_ms:.1f} | {row.measured_ms:.1f} | {row.error:+.1%} | {row.scatter:.1%} | "
            f"{', '.join(row.assumed) or 'nothing'} | {row.kind} |"
        )
    return "\n".join(lines)


def verdict(rows: Sequence[Row]) -> str:
    """Return how large the errors were, and how many pairs of layouts were in the right order."""
    errors = sorted(abs(row.error) for row in rows[1:])
    fastest = min(rows, key=lambda row: row.predicted_ms).setting.name
    really = min(rows, key=lambda row: row.measured_ms).setting.name
    held = ", ".join(f"{kind}: {right} of {pairs}" for kind, (right, pairs) in orders_held(rows).items() if pairs)
    return (
        f"Of {len(errors)} other layouts: median error {median(errors):.1%}, largest {errors[-1]:.1%}. Pairs in the "
        f"right order, by kind of change: {held}. Fastest as predicted: {fastest}; as measured: {really}."
    )


def orders_held(rows: Sequence[Row]) -> dict[str, PairsInOrder]:
    """Return how many pairs of layouts were in the predicted order, by the later of the kinds of the two."""
    kinds = list(ORDER_HELD)
    held = dict.fromkeys(kinds, PairsInOrder(0, 0))
    for first, second in combinations(rows, 2):
        kind = max(first.kind, second.kind, key=kinds.index)
        right = (first.predicted_ms < second.predicted_ms) == (first.measured_ms < second.measured_ms)
        held[kind] = PairsInOrder(held[kind].right + right, held[kind].pairs + 1)
    return held


def _run_job(place: Path, index: int, ranks: int, steps: int) -> None:
    """Train one layout in processes of its own: Megatron's groups, and gloo's threads of them, outlast a layout."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, __file__, "--train", str(place), "--index", str(index), "--steps", str(steps)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=300, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, choices=sorted(SETTINGS), default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each layout in each round")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, or judge those that are there")
    parser.add_argument("--baseline", type=Path, help="of `commtrace bench collectives`, for roles that the run lacks")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.index, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(arguments.rounds):
            for index in range(len(SETTINGS[arguments.ranks])):
                place = folder / f"{number}-{index}"
                if not place.with_suffix(".json").exists():
                    _run_job(place, index, arguments.ranks, arguments.steps)
        rows = judge(folder, arguments.ranks, arguments.rounds, arguments.baseline)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, {arguments.ranks} ranks, {arguments.rounds} rounds of {arguments.steps} steps\n")
    print(table(rows))
    print(f"\n{verdict(rows)}")


if __name__ == "__main__":
    main()
