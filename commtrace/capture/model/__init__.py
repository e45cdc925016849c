"""Capture a training loop beside its communication: modules, phases, optimizers, and the ends of steps."""
