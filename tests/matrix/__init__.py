"""The same small trainings on every version: programs for noxfile.py, and their answers on what is installed."""

STEPS = 6
