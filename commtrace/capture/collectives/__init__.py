"""Capture communication: process groups, their operations, and the waits for them."""
