"""The OpenTelemetry resource of a rank, with the names of Megatron-LM's telemetry, so that one query finds both.

Megatron-LM (``megatron.core.telemetry``, built on nemo-lens; newer than megatron-core 0.16) uses ``dl.rank``,
``dl.tensor_parallel.rank``, … and, in later versions, ``nv.dl.rank``; the run is ``nemo.run.id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.util.types import AttributeValue

from commtrace.live.rank import LiveRank

_DIMENSIONS: Final = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel"}
_RUN_ID: Final = "nemo.run.id"

NO_ATTRIBUTES: Final[Mapping[str, AttributeValue]] = {}


class RankResource(Resource):
    """A resource that caches its hash: the encoder needs it for every span, and the SDK computes it from JSON."""

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_known_hash")
        if known is None:
            known = self.__dict__["_known_hash"] = super().__hash__()
        return known


def resource_of(rank: LiveRank, provider_attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES) -> Resource:
    """Return the resource of a rank.

    ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` win over the attributes of the script's TracerProvider, which
    win over defaults. Rank, run and topology are always commtrace's own.
    """
    detected = {
        name: value
        for name, value in _of_environment().attributes.items()
        if name != SERVICE_NAME or not str(value).startswith("unknown_service")
    }
    given = {**provider_attributes, **detected}
    return RankResource({SERVICE_NAME: "commtrace", **given, **_identity(rank, given)})


def _of_environment() -> Resource:
    try:
        return Resource.create()
    except RuntimeError:
        # Python is ending: the SDK cannot start the thread of its detectors any more.
        return OTELResourceDetector().detect()


def _identity(rank: LiveRank, given: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    metadata = rank.metadata
    named: dict[str, AttributeValue] = {
        "service.instance.id": f"{metadata.run_id}-rank{metadata.rank}",
        "host.name": metadata.host,
        "process.pid": metadata.pid,
        "commtrace.run.id": metadata.run_id,
        "commtrace.attempt": metadata.attempt,
        "commtrace.node": metadata.node,
        "commtrace.version": metadata.versions.get("commtrace", ""),
        "commtrace.device.name": metadata.device,
        _RUN_ID: given.get(_RUN_ID) or metadata.run_id,
    }
    for prefix in ("dl", "nv.dl"):
        named[f"{prefix}.rank"] = metadata.rank
        named[f"{prefix}.world_size"] = metadata.world_size
        named[f"{prefix}.local_rank"] = metadata.local_rank
    if metadata.device_uuid:
        named["commtrace.device.uuid"] = metadata.device_uuid
    return {**named, **_topology(rank)}


def _topology(rank: LiveRank) -> dict[str, AttributeValue]:
    named: dict[str, AttributeValue] = {}
    for what, by_dimension in (("rank", rank.marks.coordinates), ("size", rank.marks.parallel)):
        for dimension, number in dict(by_dimension).items():
            named[f"commtrace.parallel.{dimension}.{what}"] = int(number)
            if dimension in _DIMENSIONS:
                named[f"dl.{_DIMENSIONS[dimension]}.{what}"] = int(number)
    return named
