"""The files of a run: written, kept within their budget, checked, and read back."""
