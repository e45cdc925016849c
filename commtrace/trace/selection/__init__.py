"""Which steps and modules are recorded in detail, and what is kept of the others."""
