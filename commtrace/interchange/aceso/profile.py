"""Aceso's database of measured operators: CSV files by model, microbatch, tensor parallel size and algorithm.

Format: https://github.com/microsoft/SuperScaler, branch Aceso, folder profiler. Times of operators are in µs, those of
collectives in ms, sizes in MiB, and bandwidths of messages in MiB per ms.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
            sizes = ", ".join(
                f"{case_of_profile.microbatch}/{case_of_profile.tp}/{case_of_profile.algorithm}"
                for case_of_profile in sorted(self.cases)
            )
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

    def message_ms(self, mib: float, *, between_nodes: bool) -> float:
        """Return the time of a message from one stage to the next, as Aceso looks it up.

        Raises:
            ConfigurationError: no messages were measured.
        """
        bandwidths = (between_nodes and self.between_nodes) or self.within_nodes
        if not mib:
            return 0.0
        if not bandwidths:
            raise ConfigurationError(f"{self.model}: messages were not profiled (p2p_intra_node.csv)")
        # Aceso takes the bandwidth of the next smaller size. Sizes below 1 MiB count from the end of its table.
        power = int(math.log2(mib))
        position = power - 1 if power >= 1 else power
        if not -len(bandwidths) <= position < len(bandwidths):
            position = len(bandwidths) - 1
        return mib / bandwidths[position]

    def ring_bandwidth(self, ranks: int) -> float | None:
        """Return the MiB per ms that each rank of a ring sends, of the largest all-gather; None if nothing tells it.

        What an all-gather was given is the part of one rank, which the ring passes on ranks − 1 times.
        """
        size = self.gathered_like(ranks)
        if size:
            measured = self.collectives["all_gather", size]
            return (size - 1) * max(measured) / measured[max(measured)]
        return self.within_nodes[-1] if self.within_nodes else None

    def gathered_like(self, ranks: int) -> int:
        """Return the number of ranks whose all-gathers tell the bandwidth of a ring: the most, if not these; or 0."""
        measured = [
            size
            for (operation, size), ms_by_mib in self.collectives.items()
            if operation == "all_gather"
            and size > 1
            and ms_by_mib
            and min(max(ms_by_mib), ms_by_mib[max(ms_by_mib)]) > 0
        ]
        return ranks if ranks in measured else max(measured, default=0)


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
        raise ConfigurationError(
            f"{folder} has profiles of {', '.join(models)}: choose one with a configuration of its model"
        )
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
        match = re.fullmatch(r"(.+)_mbs(\d+)_tp(\d+)_algo(\d+)", path.stem)
        if match:
            yield (match[1], Case(*map(int, match.groups()[1:]))), path


def _read_operators(path: Path) -> Operators:
    header, *rows = _rows(path) or [[]]
    if tuple(header) != _COLUMNS:
        raise ConfigurationError(f"{path}: expected the columns {','.join(_COLUMNS)}, not {','.join(header)}")
    return {row[0]: OperatorCost(*_numbers(path, row[1:], len(_COLUMNS) - 1)) for row in rows}


def _rows(path: Path) -> list[list[str]]:
    """Return the lines that are not empty."""
    try:
        with path.open(newline="") as file:
            return [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path} is no text of a profile: {error}. Copy it again.") from error


def _read_collectives(folder: Path, model: str) -> Iterator[tuple[tuple[str, int], Mapping[int, float]]]:
    for operation in _COLLECTIVES:
        for path in sorted(folder.glob(f"prim_{model}_{operation}_*gpus.csv")):
            ranks = re.fullmatch(r"(\d+)gpus", path.stem.rpartition("_")[2])
            if ranks is None:
                continue
            rows = [_numbers(path, row, 2) for row in _rows(path)[1:]]
            yield (operation, int(ranks[1])), {round(mib): ms for mib, ms in rows}


def _read_bandwidths(path: Path) -> tuple[float, ...]:
    rows = _rows(path)
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


def has_aceso_profile(folder: Path) -> bool:
    """Return whether a folder has measured operators of any model."""
    return folder.is_dir() and next(_files_of_operators(folder), None) is not None
