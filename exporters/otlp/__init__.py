"""OpenTelemetry: every step is a trace of all ranks, whose ids need no communication."""
