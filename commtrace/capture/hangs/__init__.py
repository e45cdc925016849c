"""Notice that training makes no progress, and report the state of this process."""
