"""The telemetry that is already there: what the script or its framework has installed.

Nothing is imported for it: without the SDK in the process there is no provider.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider


def installed_provider() -> TracerProvider | None:
    """Return the SDK's TracerProvider that the script or its framework has installed; None if there is none."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None


def processor_of(provider: TracerProvider | None) -> SpanProcessor | None:
    """Return what a provider hands its spans to; None if that is nothing, or cannot be had from this version of the
    SDK.

    Spans with ids of their own cannot be made with a provider's tracer, hence its processors.
    """
    if provider is None:
        return None
    from opentelemetry.sdk.trace import SpanProcessor

    processor: Any = getattr(provider, "_active_span_processor", None)
    if not isinstance(processor, SpanProcessor):
        return None
    return processor if getattr(processor, "_span_processors", ()) else None
