"""Which steps a run has, which of them count, and when they begin and end."""
