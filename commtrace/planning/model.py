"""The sizes of a transformer language model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

from commtrace.errors import ConfigurationError

_MOST: Final = {"layers": 100_000, "experts": 16_384}
_LARGEST: Final = 2**40
"""Of any other size: products of some of them still have less than 300 digits."""


def check_size(name: str, size: int, most: int) -> None:
    """Raise ConfigurationError for a size beyond what any job has."""
    if size > most:
        raise ConfigurationError(f"{name} is above {most:,}: no job has that many")


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT as Megatron-LM builds it. Sizes that are 0 follow from the others.

    Raises:
        ConfigurationError: no such model can be built.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int  # tokens
    vocabulary: int  # entries of the embedding, with its padding
    ffn: int = 0  # 0: 4 · hidden
    query_groups: int = 0  # 0: one for each head; fewer with grouped-query attention
    head_size: int = 0  # 0: hidden / heads
    gated: bool = False  # SwiGLU: a second matrix beside the first
    linear_bias: bool = True
    qkv_bias: bool = True
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    positions: Literal["learned", "rope", "none"] = "learned"
    max_positions: int = 0  # rows of learned positions; 0: sequence
    tied_embeddings: bool = True  # the output layer uses the weight of the embedding
    experts: int = 0  # 0: no mixture of experts
    experts_per_token: int = 2
    expert_ffn: int = 0  # 0: ffn
    tokenizer_vocabulary: int = 0  # entries without padding; 0: unknown
    moe_every: int = 1  # 2: every second layer has experts, the first among them
    hidden_dropout: bool = True  # its probability is above 0: masks are kept for the backward
    attention_dropout: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "experts_per_token", "moe_every"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: give a number above 0")
        for name in (
            "ffn",
            "query_groups",
            "head_size",
            "max_positions",
            "experts",
            "expert_ffn",
            "tokenizer_vocabulary",
        ):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: give a number above 0, or leave it out")
        for field in fields(self):
            size = getattr(self, field.name)
            if isinstance(size, int):
                check_size(field.name, size, _MOST.get(field.name, _LARGEST))
        if not self.head_size and self.hidden % self.heads:
            raise ConfigurationError(
                f"hidden ({self.hidden}) is no multiple of heads ({self.heads}): change one, or give head_size"
            )
        derived = {
            "ffn": 4 * self.hidden,
            "query_groups": self.heads,
            "head_size": self.hidden // self.heads,
            "max_positions": self.sequence,
        }
        for name, size in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, size)
        if not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        if self.heads % self.query_groups:
            raise ConfigurationError(f"heads ({self.heads}) is no multiple of query_groups ({self.query_groups})")
        if self.max_positions < self.sequence and self.positions == "learned":
            raise ConfigurationError(
                f"max_positions ({self.max_positions}) is below sequence ({self.sequence}): raise max_positions"
            )
        if self.experts and self.experts_per_token > self.experts:
            raise ConfigurationError(
                f"experts_per_token ({self.experts_per_token}) is above experts ({self.experts}): lower it"
            )

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer % self.moe_every == 0


def padded(elements: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-elements // unit) * unit
