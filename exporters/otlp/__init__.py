"""OpenTelemetry: every step a trace of all ranks, without the ranks talking to each other for it.

Nothing here is imported unless ``COMMTRACE_EXPORT`` names ``otlp``; the SDK comes with the extra ``otlp``.
"""
