"""Brings the clocks of all hosts together and says how well that went."""
