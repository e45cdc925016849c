"""Notices that training has stopped, and says what this process is in."""
