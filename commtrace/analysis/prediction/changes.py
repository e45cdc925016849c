"""The changes that a prediction makes to a run, as a user writes them: ``tp=2x``, ``pp=+50us``, ``8,9,8,7``.

>>> BandwidthChange.parse("tp=2x")
BandwidthChange(role='tp', factor=2.0, gbps=None)
>>> LatencyChange.parse("pp=+50us")
LatencyChange(role='pp', factor=1.0, ns=50000, is_added=True)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from commtrace.analysis.communication.rates import parse_rate
from commtrace.errors import ConfigurationError
from commtrace.trace.schedule import WRITTEN, schedule_named, with_chunks

ALL_ROLES: Final = "all"
PERFECT: Final = "perfect"
NONE: Final = "none"

_UNITS_NS: Final = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_FACTOR: Final = re.compile(r"([0-9.]+)x")
_TIME: Final = re.compile(r"([+-]?)([0-9.]+)\s*(ns|us|µs|ms|s)")


class BandwidthChange(NamedTuple):
    """The bandwidth of a role, by a factor or as bus bandwidth in 10⁹ bytes per second."""

    role: str
    factor: float = 1.0
    gbps: float | None = None

    @classmethod
    def parse(cls, text: str) -> BandwidthChange:
        """Read ``ROLE=2x``, ``ROLE=100GB/s`` or ``ROLE=800Gbit/s``. Raise ConfigurationError for anything else."""
        role, value = _role_and_value("--bandwidth", text)
        if found := _FACTOR.fullmatch(value):
            return cls(role, _positive("--bandwidth", text, found[1]))
        try:
            return cls(role, gbps=parse_rate(value) / 1e9)
        except ValueError:
            raise ConfigurationError(
                f"--bandwidth {text}: write a factor or a bus bandwidth, as in tp=2x, dp=100GB/s or dp=800Gbit/s"
            ) from None

    def describe(self, recorded_gbps: float | None = None) -> str:
        """Return ``tp bandwidth × 2`` or ``dp bandwidth 100 GB/s (recorded: 297 GB/s)``."""
        if self.gbps is None:
            return f"{self.role} bandwidth × {self.factor:g}"
        recorded = "" if recorded_gbps is None else f" (recorded: {recorded_gbps:.3g} GB/s)"
        return f"{self.role} bandwidth {self.gbps:g} GB/s{recorded}"


class LatencyChange(NamedTuple):
    """The latency of a role: the part of a transfer that does not depend on its bytes."""

    role: str
    factor: float = 1.0
    ns: int = 0
    is_added: bool = False  # to the measured latency; else ``ns`` replaces it unless ``factor`` is given

    @classmethod
    def parse(cls, text: str) -> LatencyChange:
        """Read ``ROLE=0.5x``, ``ROLE=20us``, ``ROLE=+50us`` or ``ROLE=-5us``. Raise ConfigurationError if it is not."""
        role, value = _role_and_value("--latency", text)
        if found := _FACTOR.fullmatch(value):
            return cls(role, factor=_number("--latency", text, found[1]), is_added=True)
        if found := _TIME.fullmatch(value):
            ns = round(_number("--latency", text, found[2]) * _UNITS_NS[found[3]])
            return cls(role, ns=-ns if found[1] == "-" else ns, is_added=bool(found[1]))
        raise ConfigurationError(f"--latency {text}: write a factor or a time, as in pp=0.5x, pp=20us or pp=+50us")

    def describe(self) -> str:
        """Return ``pp latency × 0.5``, ``pp latency 20 µs`` or ``pp latency + 50 µs``."""
        if self.is_added and not self.ns:
            return f"{self.role} latency × {self.factor:g}"
        sign = ("− " if self.ns < 0 else "+ ") if self.is_added else ""
        return f"{self.role} latency {sign}{abs(self.ns) / 1e3:g} µs"


class OverlapChange(NamedTuple):
    """The communication of a role is hidden behind work as a whole, or not at all."""

    role: str
    is_perfect: bool

    @classmethod
    def parse(cls, text: str) -> OverlapChange:
        """Read ``ROLE=perfect`` or ``ROLE=none``. Raise ConfigurationError for anything else."""
        role, value = _role_and_value("--overlap", text)
        if value not in (PERFECT, NONE):
            raise ConfigurationError(f"--overlap {text}: write {PERFECT} or {NONE}, as in dp={PERFECT}")
        return cls(role, value == PERFECT)

    def describe(self) -> str:
        """Return ``dp overlap perfect`` or ``dp overlap none``."""
        return f"{self.role} overlap {PERFECT if self.is_perfect else NONE}"


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything that a prediction changes; by default nothing.

    Raises:
        ConfigurationError: a change has no effect without another one, or no such schedule can be written.
    """

    bandwidth: tuple[BandwidthChange, ...] = ()
    latency: tuple[LatencyChange, ...] = ()
    overlap: tuple[OverlapChange, ...] = ()
    without_slow_ranks: tuple[int, ...] = ()
    schedule: str = ""  # any name of one that can be written, kept as it is printed; "": as recorded
    chunks: int | None = None  # v; None: as recorded
    microbatches: int | None = None  # m, per replica and step; None: as recorded
    layers: tuple[int, ...] = ()  # of each stage, after the move; empty: as recorded
    layers_before: tuple[int, ...] = ()  # of each stage in the run; empty: not known
    recompute: bool | None = None
    weight_share: float | None = None  # of a backward, which computes the gradients of weights

    def __post_init__(self) -> None:
        if self.schedule:
            object.__setattr__(self, "schedule", schedule_named(self.schedule, WRITTEN))
        if self.layers_before and not self.layers:
            raise ConfigurationError(
                f"--layers-before {','.join(map(str, self.layers_before))} moves no layers: say with --layers how many "
                "each stage is to have"
            )

    @property
    def rebuilds(self) -> bool:
        """Return whether the order or the lengths of forwards and backwards change, beyond a replay's reach."""
        return (
            bool(self.schedule or self.layers)
            or self.chunks is not None
            or self.microbatches is not None
            or self.recompute is not None
        )

    def with_slow_ranks(self, ranks: tuple[int, ...]) -> Changes:
        """Return these changes, and ranks that work as fast as their peers."""
        return replace(self, without_slow_ranks=ranks)

    def describe(self, recorded_gbps: Mapping[str, float] | None = None) -> tuple[str, ...]:
        """Return one phrase per change. ``recorded_gbps`` are bus bandwidths by role."""
        phrases = [change.describe((recorded_gbps or {}).get(change.role)) for change in self.bandwidth]
        phrases += [change.describe() for change in self.latency]
        phrases += [change.describe() for change in self.overlap]
        if self.without_slow_ranks:
            ranks = ", ".join(map(str, self.without_slow_ranks))
            phrases.append(f"rank{'s' * (len(self.without_slow_ranks) > 1)} {ranks} as fast as the others")
        if self.schedule:
            phrases.append(f"schedule {with_chunks(self.schedule, self.chunks or 1)}")
        if self.chunks is not None:
            phrases.append(f"{self.chunks} chunk{'s' * (self.chunks > 1)} per stage")
        if self.microbatches is not None:
            phrases.append(f"{self.microbatches} microbatches")
        if self.layers:
            phrases.append(f"layers per stage {', '.join(map(str, self.layers))}")
        if self.recompute is not None:
            phrases.append(f"recompute {'on' if self.recompute else 'off'}")
        return tuple(phrases)

    def left_out(self) -> tuple[str, ...]:
        """Return what neither a prediction with these changes nor its ± holds, in phrases."""
        phrases = []
        if self.bandwidth or self.latency:
            phrases.append("another network may make the library choose another algorithm")
        if self.without_slow_ranks:
            phrases.append("transfers of the slow rank that no finding names take as long as recorded")
        if self.schedule or self.chunks is not None:
            phrases.append("what the code of another schedule takes itself, its kinds of messages, its memory")
        if self.microbatches is not None:
            phrases.append("memory of microbatches in flight, and whether another batch trains as well")
        if self.layers:
            phrases.append("gradient reduction and optimizer of the layers that move, and their memory")
        if self.recompute is not None:
            phrases.append("memory, and what the framework takes to keep or to repeat activations")
        return tuple(phrases)


def parse_layers(option: str, text: str) -> tuple[int, ...]:
    """Read ``8,9,8,7``. Raise ConfigurationError unless these are counts of at least 1."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or min(layers) < 1:
        raise ConfigurationError(f"{option} {text}: write the layers of each stage, as in 8,9,8,7")
    return layers


def _role_and_value(option: str, text: str) -> tuple[str, str]:
    role, equals, value = text.partition("=")
    if not (role and equals and value):
        raise ConfigurationError(f"{option} {text}: write ROLE=VALUE; ROLE is tp, pp, dp, … or {ALL_ROLES}")
    return role.strip(), value.strip()


def _number(option: str, text: str, digits: str) -> float:
    try:
        value = float(digits)
    except ValueError:
        raise ConfigurationError(f"{option} {text}: {digits} is no number") from None
    return value


def _positive(option: str, text: str, digits: str) -> float:
    value = _number(option, text, digits)
    if not value > 0 or math.isinf(value):
        raise ConfigurationError(f"{option} {text}: the value must be above 0")
    return value
