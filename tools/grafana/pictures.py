"""Takes pictures of the dashboards in a Grafana: ``python -m tools.grafana.pictures http://localhost:3000``.

It has the dashboards of exporters/grafana, and a Prometheus with a run, as that of examples/monitoring/compose.yml has.
Where nobody may look without an account, GRAFANA_TOKEN is a service account's. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from tools.grafana.dashboards import dashboards
from tools.pictures import IMAGES, open_chromium

_SECONDS_TO_DRAW: Final = 5
_SIZE: Final = (1600, 1000)


def addresses(grafana: str, variables: dict[str, str], time: str) -> Iterator[tuple[str, str]]:
    """Yield the name of a picture and the address of its dashboard, without menus."""
    query = urlencode({"kiosk": "1", "from": f"now-{time}", "to": "now", **variables})
    for dashboard in dashboards().values():
        uid = str(dashboard["uid"])
        yield f"grafana-{uid.removeprefix('commtrace-')}.png", f"{grafana.rstrip('/')}/d/{uid}?{query}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Take pictures of the dashboards in a Grafana.")
    parser.add_argument("grafana", help="its address, such as http://localhost:3000")
    parser.add_argument("--run", help="the run to choose; the newest by default")
    parser.add_argument("--rank", help="the rank to choose on the dashboard Rank")
    parser.add_argument("--node", help="the node to choose on the dashboard Node")
    parser.add_argument("--time", default="1h", help="how far back, such as 30m (default 1h)")
    parser.add_argument("--output", type=Path, default=IMAGES, help="a folder (default docs/images)")
    options = parser.parse_args(arguments)
    chosen = {"var-run_id": options.run, "var-rank": options.rank, "var-node": options.node}
    variables = {name: value for name, value in chosen.items() if value}
    token = os.environ.get("GRAFANA_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with open_chromium() as browser:
        page = browser.new_page(viewport={"width": _SIZE[0], "height": _SIZE[1]}, extra_http_headers=headers)
        for name, address in addresses(options.grafana, variables, options.time):
            answer = page.goto(address)
            if answer is None or not answer.ok:
                raise SystemExit(f"{address}: {answer.status if answer else 'no answer'}")
            page.wait_for_timeout(1000 * _SECONDS_TO_DRAW)
            page.screenshot(path=options.output / name)
            print(options.output / name)


if __name__ == "__main__":
    main()
