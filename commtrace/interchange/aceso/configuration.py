"""A configuration that Aceso found: which operators each stage has, and how each of them is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from commtrace.errors import ConfigurationError
from commtrace.interchange.aceso.profile import AcesoProfile, Case
from commtrace.trace.json_values import JsonObject, to_json

_MOST_LAYERS: Final = 10_000
_LARGEST_BATCH: Final = 65_536
_FOLLOW: Final = frozenset({"num_stages", "checkpoint_activations", "resharding_stages"})
"""Fields of a configuration that follow from the others."""


class PlacedOperator(NamedTuple):
    """One operator of a stage."""

    name: str
    case: Case
    dp: int
    is_recomputed: bool


@dataclass(frozen=True, slots=True)
class AcesoJob:
    """The fields of Aceso's JSON that do not say how the model is divided."""

    model_name: str
    model_size: str
    num_layers: int | list[int]  # of a ResNet, the blocks of each group
    global_batch_size: int

    @property
    def model(self) -> str:
        """The name of the profile of this model."""
        return f"{self.model_name}_{self.model_size}"


class AcesoStage(NamedTuple):
    """The operators of one stage, and its GPUs."""

    gpus: int
    operators: tuple[PlacedOperator, ...]


@dataclass(frozen=True, slots=True)
class AcesoConfiguration(AcesoJob):
    """The fields of Aceso's JSON that decide time and memory; the lists of lists are by stage and operator."""

    micro_batch_size: int  # of all data parallel ranks together
    num_gpus: list[int]
    num_ops_in_each_stage: list[int]
    model_parallel_size_of_each_op: list[list[int]]
    data_parallel_size_of_each_op: list[list[int]]
    recompute_ops: list[list[int]]
    algo_of_each_op: list[list[int]]

    @property
    def microbatches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    def file_content(self, sizes: Mapping[str, msgspec.Raw]) -> JsonObject:
        """Return the configuration as Aceso writes it, with the sizes of the model, which it does not need itself."""
        stages = range(len(self.num_gpus))
        return {
            **{name: msgspec.json.decode(size) for name, size in sizes.items()},
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "num_stages": len(self.num_gpus),
            "num_gpus": list(self.num_gpus),
            "checkpoint_activations": [any(self.recompute_ops[stage]) for stage in stages],
            "resharding_stages": [self._changes_division(stage) for stage in stages],
            "num_ops_in_each_stage": list(self.num_ops_in_each_stage),
            "model_parallel_size_of_each_op": to_json(self.model_parallel_size_of_each_op),
            "data_parallel_size_of_each_op": to_json(self.data_parallel_size_of_each_op),
            "recompute_ops": to_json(self.recompute_ops),
            "algo_of_each_op": to_json(self.algo_of_each_op),
        }

    def _changes_division(self, stage: int) -> bool:
        """Return whether operators of a stage may be divided in different ways, as those of algorithm 1 are."""
        sizes = zip(self.model_parallel_size_of_each_op[stage], self.data_parallel_size_of_each_op[stage], strict=True)
        is_divided = max(self.model_parallel_size_of_each_op[stage]) > 1
        return len(set(sizes)) > 1 or (is_divided and any(self.algo_of_each_op[stage]))

    def stages(self, profile: AcesoProfile) -> tuple[AcesoStage, ...]:
        """Return the stages with the operators of a profile.

        Raises:
            ConfigurationError: the configuration has other operators than the profile.
        """
        names = model_operators(profile, self.model_name, self.num_layers)
        if len(names) != sum(self.num_ops_in_each_stage):
            raise ConfigurationError(
                f"the configuration divides {sum(self.num_ops_in_each_stage)} operators, the model of {profile.model} "
                f"has {len(names)}: they do not belong together"
            )
        stages, begin = [], 0
        for stage, count in enumerate(self.num_ops_in_each_stage):
            placed = zip(
                names[begin : begin + count],
                self.model_parallel_size_of_each_op[stage],
                self.data_parallel_size_of_each_op[stage],
                self.algo_of_each_op[stage],
                self.recompute_ops[stage],
                strict=True,
            )
            operators = tuple(
                PlacedOperator(name, Case(self.micro_batch_size // dp, tp, algorithm), dp, bool(is_recomputed))
                for name, tp, dp, algorithm, is_recomputed in placed
            )
            stages.append(AcesoStage(self.num_gpus[stage], operators))
            begin += count
        return tuple(stages)


def model_operators(profile: AcesoProfile, family: str, layers: int | list[int]) -> tuple[str, ...]:
    """Return the operators of a whole model; a profile has those of one layer once.

    Raises:
        ConfigurationError: the family of models is not known.
    """
    names = profile.operators
    if family == "resnet":
        return names
    if not isinstance(layers, int) or family not in ("gpt", "t5"):
        raise ConfigurationError(f"models of the kind {family} with num_layers {layers} are not known")
    last_of_encoder = "enc-post-MLP-dropout"
    if last_of_encoder not in names:
        raise ConfigurationError(f"{profile.model}: the profile has no operator {last_of_encoder}")
    end = names.index(last_of_encoder) + 1
    encoder = (names[0], *names[1:end] * layers)
    if family == "gpt":
        return (*encoder, *names[end:])
    first_of_decoder, last_of_decoder = "dec-1st-layernorm", "dec-post-MLP-dropout"
    if not {first_of_decoder, last_of_decoder} <= set(names):
        raise ConfigurationError(f"{profile.model}: the profile has no operators of a decoder's layer")
    begin, behind = names.index(first_of_decoder), names.index(last_of_decoder) + 1
    return (*encoder, *names[end:begin], *names[begin:behind] * layers, *names[behind:])


def read_aceso_job(path: Path) -> tuple[AcesoJob, dict[str, msgspec.Raw]]:
    """Return what a JSON of Aceso says about the model and its batch, and all its sizes as they are in the file.

    A configuration may be given: how it divides the model is left out.

    Raises:
        ConfigurationError: the file has no such sizes.
        OSError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
        job = msgspec.json.decode(content, type=AcesoJob)
        sizes = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{path} does not say which model it is: {error}. Needed are model_name, model_size, num_layers and "
            "global_batch_size, as in the JSON files of Aceso"
        ) from error
    check_sizes(str(path), job.num_layers, job.global_batch_size)
    divided = {field.name for field in fields(AcesoConfiguration)} - {field.name for field in fields(AcesoJob)}
    return job, {name: size for name, size in sizes.items() if name not in divided | _FOLLOW}


def check_sizes(source: str, num_layers: int | list[int], global_batch_size: int) -> None:
    """Raise ConfigurationError for sizes that no model or batch has: every layer and microbatch is replayed."""
    layers = num_layers if isinstance(num_layers, list) else [num_layers]
    if not layers or min(layers) < 1 or sum(layers) > _MOST_LAYERS or not 1 <= global_batch_size <= _LARGEST_BATCH:
        raise ConfigurationError(
            f"{source}: num_layers must be from 1 to {_MOST_LAYERS:,}, global_batch_size from 1 to {_LARGEST_BATCH:,}"
        )


def read_aceso_configuration(path: Path) -> AcesoConfiguration:
    """Return a configuration of Aceso's search.

    Raises:
        ConfigurationError: the file is no such configuration, or contradicts itself.
        OSError: the file cannot be read.
    """
    try:
        configuration = msgspec.json.decode(path.read_bytes(), type=AcesoConfiguration)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is no configuration of Aceso: {error}") from error
    check_sizes(str(path), configuration.num_layers, configuration.global_batch_size)
    lists = (
        configuration.model_parallel_size_of_each_op,
        configuration.data_parallel_size_of_each_op,
        configuration.recompute_ops,
        configuration.algo_of_each_op,
    )
    sizes = configuration.num_ops_in_each_stage
    if len(configuration.num_gpus) != len(sizes) or any([len(row) for row in rows] != sizes for rows in lists):
        raise ConfigurationError(f"{path}: the lists of operators do not have the lengths of num_ops_in_each_stage")
    if not sizes or min(sizes) < 1:
        raise ConfigurationError(f"{path}: a stage has no operators")
    positive = [
        *configuration.num_gpus,
        configuration.micro_batch_size,
        *(value for rows in lists[:2] for row in rows for value in row),
    ]
    if min(positive) < 1 or configuration.global_batch_size < configuration.micro_batch_size:
        raise ConfigurationError(f"{path}: sizes below 1, or a global batch below the microbatch")
    return configuration
