"""Dashboards for Grafana, made of plain dictionaries: ``python -m commtrace.exporters.grafana.generate``."""
