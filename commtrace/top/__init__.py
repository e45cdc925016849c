"""Where a running job's time goes now: one frame of ``commtrace top``, from its files or from its metrics."""
