"""OpenTelemetry: every step is a trace of all ranks, whose ids need no communication.

Nothing here is imported unless ``COMMTRACE_EXPORT`` names ``otlp``; the SDK comes with the extra ``otlp``.
"""
