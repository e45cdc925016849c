"""Predict a step of a recorded run under changes: its replay, its pipeline rebuilt from its parts, and both as rows."""
