"""Files of AICB and SimAI, filled from measurements or from a plan."""
