"""What can be wrong with a synthetic job, and how it is written on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from commtrace.errors import ConfigurationError
from commtrace.trace.step_range import StepRange

SLOW_RANK: Final = "slow-rank"
SLOW_HOST: Final = "slow-host"
SLOW_LINK: Final = "slow-link"
DATA: Final = "data"
GC: Final = "gc"
UNEVEN_STAGE: Final = "uneven-stage"
SEQUENCE_IMBALANCE: Final = "sequence-imbalance"

FORMS: Final = {
    SLOW_RANK: "slow-rank=RANK:FACTOR",
    SLOW_HOST: "slow-host=HOST:FACTOR",
    SLOW_LINK: "slow-link=RANK:FACTOR or slow-link=RANK-RANK:FACTOR",
    DATA: "data=RANK:MILLISECONDS",
    GC: "gc=RANK[:MILLISECONDS]",
    UNEVEN_STAGE: "uneven-stage=STAGE:FACTOR",
    SEQUENCE_IMBALANCE: "sequence-imbalance[=SIGMA]",
}
_DEFAULT_AMOUNT: Final = {GC: 50.0, SEQUENCE_IMBALANCE: 0.3}
_PATTERN: Final = re.compile(r"^(?P<kind>[a-z-]+)(?:=(?P<first>[^:@-]+)(?:-(?P<second>\d+))?(?::(?P<amount>[^@]+))?)?$")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, in some steps.

    Attributes:
        kind: one of :data:`FORMS`.
        where: the rank, the host, the stage, or the two ranks of a link; empty for a sequence imbalance.
        amount: a factor on durations, milliseconds (``data``, ``gc``) or the standard deviation of the logarithm of a
            microbatch's work (``sequence-imbalance``).
        steps: in which steps; all by default.
    """

    kind: str
    where: tuple[int, ...] = ()
    amount: float = 1.0
    steps: StepRange = field(default_factory=StepRange)

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise ConfigurationError(f"fault {self.kind!r}: there are {', '.join(FORMS)}")
        if self.amount <= 0:
            raise ConfigurationError(f"fault {self.kind}: {self.amount} must be above 0")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From ``KIND=WHERE:AMOUNT``, and ``@A:B`` behind it for the steps A to B (exclusive).

        Raises:
            ConfigurationError: the text is of no such form.
        """
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

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "where": list(self.where), "amount": self.amount, "steps": str(self.steps)}


def _where_and_amount(kind: str, match: re.Match[str]) -> tuple[tuple[int, ...], float]:
    first, second, amount = match["first"], match["second"], match["amount"]
    if kind == SEQUENCE_IMBALANCE:
        return (), float(first) if first else _DEFAULT_AMOUNT[kind]
    if second is not None and kind != SLOW_LINK:
        raise ValueError
    where = (int(first),) if second is None else (int(first), int(second))
    return where, float(amount) if amount is not None or kind not in _DEFAULT_AMOUNT else _DEFAULT_AMOUNT[kind]
