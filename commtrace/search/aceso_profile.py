"""Aceso's database of measured operators: CSV files by model, microbatch, tensor parallel size and algorithm.

Format: https://github.com/microsoft/SuperScaler, branch Aceso, folder profiler. Times of operators are in µs, those of
collectives in ms, sizes in MiB, and bandwidths of messages in MiB per ms.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from commtrace.errors import ConfigurationError

_COLUMNS: Final = (
    "op_name", "forward-compute", "backward-compute", "input_size", "output_size", "weights", "activations",
    "fwd_reserved", "bwd_reserved",
)  # fmt: skip

_COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class OperatorCost(NamedTuple):
    """What was measured of one operator on one GPU."""

    forward_us: float
    backward_us: float
    input_mib: float
    output_mib: float
    weights_mib: float
    activations_mib: float
    forward_reserved_mib: float
    backward_reserved_mib: float


class Case(NamedTuple):
    """In which form an operator was measured."""

    microbatch: int
    tp: int
    algorithm: int  # 0 or 1: by columns or rows of a matrix, by output or input channels of a convolution


Operators: TypeAlias = Mapping[str, OperatorCost]


@dataclass(frozen=True, slots=True)
class AcesoProfile:
    """The measurements of one model."""

    model: str  # gpt_1_3B
    cases: Mapping[Case, Operators]
    collectives: Mapping[tuple[str, int], Mapping[int, float]]  # by operation and ranks: ms by MiB
    within_nodes: tuple[float, ...]  # bandwidth of messages of 1, 2, 4 … MiB
    between_nodes: tuple[float, ...] = field(default=())  # empty: not measured

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators, each once, in the order of the model."""
        return tuple(self.cases[min(self.cases)])

    def cost(self, operator: str, case: Case) -> OperatorCost:
        """Return what was measured of an operator.

        Raises:
            ConfigurationError: it was not.
        """
        if case not in self.cases:
            sizes = ", ".join(f"{one.microbatch}/{one.tp}/{one.algorithm}" for one in sorted(self.cases))
            raise ConfigurationError(
                f"{self.model} was not profiled with microbatch {case.microbatch}, tp {case.tp}, algorithm "
                f"{case.algorithm}; there are (microbatch/tp/algorithm) {sizes}"
            )
        if operator not in self.cases[case]:
            raise ConfigurationError(f"{self.model}: {operator} was not profiled with {case}")
        return self.cases[case][operator]

    def collective_ms(self, operation: str, ranks: int, mib: float) -> float:
        """Return the time of a collective whose size rounds to a measured one, or to 1 MiB above it.

        Raises:
            ConfigurationError: no such size was measured.
        """
        measured = self.collectives.get((operation, ranks), {})
        for size in (round(mib), round(mib - 1)):
            if size in measured:
                return measured[size]
        raise ConfigurationError(f"{self.model}: no {operation} of {mib:g} MiB on {ranks} GPUs was profiled")


def read_aceso_profile(folder: Path, model: str = "") -> AcesoProfile:
    """Return the measurements of a model from a folder of Aceso's CSV files.

    Args:
        model: Its name in those of the files, such as ``gpt_1_3B``. Not needed if there is only one.

    Raises:
        ConfigurationError: there is no such model, or a file cannot be understood.
        OSError: a file cannot be read.
    """
    files = dict(_files_of_operators(folder))
    models = sorted({name for name, _ in files})
    if not models:
        raise ConfigurationError(f"{folder} has no profile of Aceso: files such as gpt_1_3B_mbs1_tp1_algo0.csv")
    if not model and len(models) > 1:
        raise ConfigurationError(f"{folder} has profiles of {', '.join(models)}: choose one with --profile")
    model = model or models[0]
    if model not in models:
        raise ConfigurationError(f"{folder} has no profile of {model}, only of {', '.join(models)}")
    within = folder / "p2p_intra_node.csv"
    between = folder / "p2p_inter_node.csv"
    return AcesoProfile(
        model=model,
        cases={case: _read_operators(path) for (name, case), path in files.items() if name == model},
        collectives=dict(_read_collectives(folder, model)),
        within_nodes=_read_bandwidths(within) if within.exists() else (),
        between_nodes=_read_bandwidths(between) if between.exists() else (),
    )


def _files_of_operators(folder: Path) -> Iterator[tuple[tuple[str, Case], Path]]:
    for path in sorted(folder.glob("*_mbs*_tp*_algo*.csv")):
        found = re.fullmatch(r"(.+)_mbs(\d+)_tp(\d+)_algo(\d+)", path.stem)
        if found:
            yield (found[1], Case(*map(int, found.groups()[1:]))), path


def _read_operators(path: Path) -> Operators:
    with path.open(newline="") as file:
        rows = csv.reader(file)
        header = tuple(next(rows, ()))
        if header != _COLUMNS:
            raise ConfigurationError(f"{path}: expected the columns {','.join(_COLUMNS)}, not {','.join(header)}")
        return {row[0]: OperatorCost(*_numbers(path, row[1:], len(_COLUMNS) - 1)) for row in rows if row}


def _read_collectives(folder: Path, model: str) -> Iterator[tuple[tuple[str, int], Mapping[int, float]]]:
    for operation in _COLLECTIVES:
        for path in sorted(folder.glob(f"prim_{model}_{operation}_*gpus.csv")):
            ranks = re.fullmatch(r"(\d+)gpus", path.stem.rpartition("_")[2])
            if ranks is None:
                continue
            with path.open(newline="") as file:
                rows = [_numbers(path, row, 2) for row in islice(csv.reader(file), 1, None) if row]
            yield (operation, int(ranks[1])), {round(mib): ms for mib, ms in rows}


def _read_bandwidths(path: Path) -> tuple[float, ...]:
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    if len(rows) < 2:
        raise ConfigurationError(f"{path}: expected a line of sizes and a line of bandwidths")
    return tuple(_numbers(path, rows[1], len(rows[0])))


def _numbers(path: Path, words: list[str], count: int) -> list[float]:
    try:
        numbers = [float(word) for word in words]
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if len(numbers) != count or any(not 0 <= number < float("inf") for number in numbers):
        raise ConfigurationError(f"{path}: expected {count} numbers from 0 on, not {','.join(words)}")
    return numbers
