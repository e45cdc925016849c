"""Selects steps and modules for detail, and sums up the others."""
