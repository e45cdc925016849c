"""Select steps and modules for detail, and sum up the others."""
