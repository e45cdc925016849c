"""Metrics for Prometheus: an endpoint per rank, or a file for node-exporter; target files, rules and alerts."""
