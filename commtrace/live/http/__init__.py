"""Speak HTTP with other services: within a time, and without their secrets in what is said of it."""
