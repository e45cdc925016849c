"""What ``commtrace bench overhead`` puts on PYTHONPATH: a clock of steps that works with and without commtrace."""
