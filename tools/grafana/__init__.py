"""Dashboards for Grafana, generated from code and checked in."""
