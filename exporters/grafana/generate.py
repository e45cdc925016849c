"""Writes the dashboards that are checked in: ``python -m commtrace.exporters.grafana.generate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from commtrace.exporters.grafana.dashboards import dashboards

DIRECTORY: Final = Path(__file__).parent / "dashboards"


def dashboard_files() -> dict[str, str]:
    """Return the texts of the files by name."""
    return {name: json.dumps(dashboard, indent=1) + "\n" for name, dashboard in dashboards().items()}


if __name__ == "__main__":
    for name, text in dashboard_files().items():
        (DIRECTORY / name).write_text(text)
        print(DIRECTORY / name)
