"""Divide the time of steps, ranks, modules and the whole run, exactly."""
