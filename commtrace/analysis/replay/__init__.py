"""Replay a recorded run with other durations: the engine under the what-if analysis."""
