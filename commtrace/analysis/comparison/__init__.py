"""Compare two runs, with the noise of their numbers."""
