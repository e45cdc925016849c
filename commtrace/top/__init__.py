"""Frames of ``commtrace top``: where a running job's time goes now, from its files or its metrics."""
