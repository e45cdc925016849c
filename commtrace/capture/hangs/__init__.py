"""Notices that training makes no progress, and reports the state of this process."""
