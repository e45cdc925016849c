"""Processes that take the place of commtrace.cli.ending, for test_findings_at_end.py."""
