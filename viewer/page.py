"""The HTML of the page, with its script and its style in it."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

_PERFETTO_UI: Final = "https://ui.perfetto.dev"
"""Only in a page that is served: the file of a report holds no address of another host."""

_PLACEHOLDER: Final = re.compile(r"\{\{(\w+)\}\}")


def fill_page(title: str, resources: Sequence[str], *, server: str | None = None, of_several: bool = False) -> str:
    """Return the page.

    Args:
        resources: script elements that hold data.
        server: address that data are read from instead; relative, so that it holds behind a tunnel.
        of_several: the server has other runs, too, and a list of them.
    """
    script = _asset("viewer.js")
    served = ""
    if server is not None:
        served = f' data-server="{html.escape(server)}" data-perfetto="{_PERFETTO_UI}"'
        served += " data-several" if of_several else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "title": html.escape(title),
        "style": _asset("viewer.css"),
        "resources": "\n".join(resources),
        "script": script,
        "script_hash": f"sha256-{digest}",
        "connect": "connect-src 'self'; " if server is not None else "",
        "server": served,
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], _asset("viewer.html"))


def _asset(name: str) -> str:
    return files("commtrace.viewer").joinpath("assets", name).read_text("utf-8")
