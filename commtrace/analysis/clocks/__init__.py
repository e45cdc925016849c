"""Bring the clocks of all hosts together and say how well that went."""
