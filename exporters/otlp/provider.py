"""The TracerProvider that the script or its framework has installed; nothing is imported to find out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider


def installed_provider() -> TracerProvider | None:
    """Return the SDK's TracerProvider that the script has installed; None without one."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None


def processor_of(provider: TracerProvider | None) -> SpanProcessor | None:
    """Return the span processor of a provider; None if it has none, or this version of the SDK hides it."""
    if provider is None:
        return None
    from opentelemetry.sdk.trace import SpanProcessor

    processor: Any = getattr(provider, "_active_span_processor", None)
    if not isinstance(processor, SpanProcessor):
        return None
    return processor if getattr(processor, "_span_processors", ()) else None


class ProviderSpans:
    """Sends spans through the processor of a provider, whose tracer cannot make spans with given ids."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        for span in spans:
            self._processor.on_end(span)
        # A BatchSpanProcessor silently drops the oldest of more than 2,048 spans.
        return bool(self._processor.force_flush())

    def shutdown(self) -> None:
        """Do nothing: the processor belongs to the script."""
