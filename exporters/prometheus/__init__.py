"""Metrics for Prometheus: an endpoint per rank, or a file for node-exporter; target files, rules and alerts.

``COMMTRACE_EXPORT=prometheus`` switches it on; docs/prometheus.md says what is exported.
"""
