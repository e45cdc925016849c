"""The steps of a run: their begin and end, and the choice of those that count."""
