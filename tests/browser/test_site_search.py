"""The search of the documentation's site, in a browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.site import build_site

QUESTIONS = {
    "deepspeed hostfile": "launchers",
    "how much disk": "production",
    "webhook": "monitor",
    "requeue": "slurm",
    "switching it off": "production",
}
"""What somebody may type, and a page that must be among the first three that are offered."""


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = build_site(tmp_path_factory.mktemp("site"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_questions_are_answered_by_the_search(address: str, browser: Any) -> None:
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    offered: dict[str, list[str]] = {}
    for question, wanted in QUESTIONS.items():
        page.goto(address)
        page.click(".md-search__input")
        page.keyboard.type(question)
        page.wait_for_selector(".md-search-result__item a")
        # What is offered first answers the words typed so far.
        deadline = time.monotonic() + 10
        while wanted not in offered.get(question, ()) and time.monotonic() < deadline:
            links = page.eval_on_selector_all(
                ".md-search-result__item > a", "links => links.slice(0, 3).map(link => link.pathname)"
            )
            offered[question] = [link.strip("/") for link in links]
    page.close()

    assert {question: offered[question] for question, page in QUESTIONS.items() if page not in offered[question]} == {}
    assert [url for url in requests if not url.startswith(address)] == []
