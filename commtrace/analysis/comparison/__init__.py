"""What changed between two runs, and how far chance alone moves their numbers."""
