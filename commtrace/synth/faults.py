"""Describe faults of a synthetic job, also as text for the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from commtrace.errors import ConfigurationError
from commtrace.trace.selection import StepRange

SLOW_RANK: Final = "slow-rank"
SLOW_FORWARD: Final = "slow-forward"
SLOW_BACKWARD: Final = "slow-backward"
SLOW_OPTIMIZER: Final = "slow-optimizer"
SLOW_HOST: Final = "slow-host"
SLOW_LINK: Final = "slow-link"
SLOW_SEND: Final = "slow-send"
SLOW_NETWORK: Final = "slow-network"
DATA: Final = "data"
GC: Final = "gc"
CHECKPOINT: Final = "checkpoint"
EVALUATION: Final = "evaluation"
LATE_LAUNCH: Final = "late-launch"
LATE_HOST: Final = "late-host"
UNEVEN_STAGE: Final = "uneven-stage"
LONG_MICROBATCH: Final = "long-microbatch"
SEQUENCE_IMBALANCE: Final = "sequence-imbalance"

FORMS: Final = {
    SLOW_RANK: "slow-rank=RANKS:FACTOR",
    SLOW_FORWARD: "slow-forward=RANKS:FACTOR",
    SLOW_BACKWARD: "slow-backward=RANKS:FACTOR",
    SLOW_OPTIMIZER: "slow-optimizer=RANKS:FACTOR",
    SLOW_HOST: "slow-host=HOSTS:FACTOR",
    SLOW_LINK: "slow-link=RANK:FACTOR or slow-link=RANK-RANK:FACTOR",
    SLOW_SEND: "slow-send=RANK:FACTOR or slow-send=FROM-TO:FACTOR",
    SLOW_NETWORK: "slow-network=HOSTS:FACTOR",
    DATA: "data=RANKS:MILLISECONDS",
    GC: "gc=RANKS[:MILLISECONDS]",
    CHECKPOINT: "checkpoint=RANKS:MILLISECONDS",
    EVALUATION: "evaluation=RANKS:MILLISECONDS",
    LATE_LAUNCH: "late-launch=RANKS:MILLISECONDS",
    LATE_HOST: "late-host=RANKS:FACTOR",
    UNEVEN_STAGE: "uneven-stage=STAGES:FACTOR",
    LONG_MICROBATCH: "long-microbatch=MICROBATCH:FACTOR or long-microbatch=MICROBATCH-REPLICA:FACTOR",
    SEQUENCE_IMBALANCE: "sequence-imbalance[=SIGMA]",
}
"""By kind. RANKS, HOSTS and STAGES are numbers separated by commas."""

CAUSES: Final = {
    SLOW_RANK: "compute",
    SLOW_FORWARD: "forward",
    SLOW_BACKWARD: "backward",
    SLOW_OPTIMIZER: "optimizer",
    SLOW_HOST: "compute",
    SLOW_LINK: "communication",
    SLOW_SEND: "communication",
    SLOW_NETWORK: "communication",
    DATA: "data",
    GC: "gc",
    CHECKPOINT: "checkpoint",
    EVALUATION: "evaluation",
    LATE_LAUNCH: "late_launch",
    LATE_HOST: "host",
    UNEVEN_STAGE: "stage_imbalance",
    LONG_MICROBATCH: "sequence_length_imbalance",
    SEQUENCE_IMBALANCE: "sequence_length_imbalance",
}
"""The cause that a verdict should name, by kind."""

PLACES: Final = {
    SLOW_HOST: "host",
    SLOW_LINK: "link",
    SLOW_SEND: "link",
    SLOW_NETWORK: "network",
    UNEVEN_STAGE: "stage",
    LONG_MICROBATCH: "job",
    SEQUENCE_IMBALANCE: "job",
}
"""The place that a verdict should name, if not ranks."""

OF_HOSTS: Final = (SLOW_HOST, SLOW_NETWORK)
OF_PAIRS: Final = (SLOW_LINK, SLOW_SEND, LONG_MICROBATCH)
"""``where`` is one number, or two with a hyphen between them."""

_DEFAULT_AMOUNT: Final = {GC: 50.0, SEQUENCE_IMBALANCE: 0.3}
_PATTERN: Final = re.compile(r"^(?P<kind>[a-z-]+)(?:=(?P<where>[^:@]+)(?::(?P<amount>[^@]+))?)?$")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, in some steps."""

    kind: str  # of FORMS
    # ranks, hosts or stages; ranks of a link, sender first; a microbatch, perhaps a replica
    where: tuple[int, ...] = ()
    amount: float = 1.0  # a factor, ms per step (see FORMS), or sigma of the logarithm of a microbatch's work
    steps: StepRange = field(default_factory=StepRange)

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise ConfigurationError(f"fault {self.kind!r}: write one of {', '.join(FORMS)}")
        if self.amount <= 0:
            raise ConfigurationError(f"fault {self.kind}: {self.amount} must be above 0")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse ``KIND=WHERE:AMOUNT``, optionally ``@A:B`` for steps A to B (exclusive); raise ConfigurationError."""
        spoken, _, steps = text.strip().partition("@")
        match = _PATTERN.match(spoken)
        if match is None or match["kind"] not in FORMS:
            raise ConfigurationError(f"fault {text!r}: write {'; '.join(FORMS.values())}; add @A:B for steps A to B")
        kind = match["kind"]
        try:
            where, amount = _where_and_amount(kind, match)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"fault {text!r}: write {FORMS[kind]}") from error
        return cls(kind, where, amount, StepRange.parse(steps) if steps else StepRange())

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind, "where": list(self.where), "amount": self.amount, "steps": str(self.steps)}


def _where_and_amount(kind: str, match: re.Match[str]) -> tuple[tuple[int, ...], float]:
    where, amount = match["where"], match["amount"]
    if kind == SEQUENCE_IMBALANCE:
        return (), float(where) if where else _DEFAULT_AMOUNT[kind]
    numbers = tuple(int(number) for number in re.split("-" if kind in OF_PAIRS else ",", where))
    if kind in OF_PAIRS and len(numbers) > 2:
        raise ValueError
    return numbers, float(amount) if amount is not None or kind not in _DEFAULT_AMOUNT else _DEFAULT_AMOUNT[kind]
