"""Serve runs to a browser on this machine.

Addresses, all behind a token: ``/`` lists the runs, ``/run/NAME/`` is the page of one, ``/run/NAME/data/RESOURCE`` are
its data (docs/viewer-data.md), ``/run/NAME/state`` says whether it has grown, and a POST to ``/run/NAME/read`` makes
the server read it again; one to ``/run/NAME/whatif``, with changes as its query, is answered with a prediction.
"""

from __future__ import annotations

import gzip
import hmac
import json
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from commtrace.errors import CommtraceError, ConfigurationError
from commtrace.trace.inputs import MOST_RANKS
from commtrace.viewer.page import fill_page
from commtrace.viewer.run_view import Pending, RunView
from commtrace.viewer.what_if import Question

_LOOPBACK: Final = "127.0.0.1"
_MOST_CONNECTIONS: Final = 64
"""At once: a browser opens up to six."""

_SILENT_SECONDS: Final = 30.0
_MOST_FIELDS: Final = 1_000
_RANK: Final = re.compile("[0-9]{1,9}")
_COMPRESSED_FROM: Final = 4096
"""Bytes of an answer from which compression pays, behind a slow tunnel at least."""


class _BoundedServer(ThreadingHTTPServer):
    """Serves a limited number of connections at once, each on a thread, and prints nothing of those that break off."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class RunServer:
    """Serves the runs of a site until it is closed.

    Args:
        paths: the run directories, by the name in their address.
        open_view: starts to read a run.
        list_runs: what ``/data/runs.json`` answers, a JSON object.
        token: must come with every request, as ``?token=`` or in the header ``Authorization: Bearer``.
        port: 0 for a free one.

    Raises:
        ConfigurationError: the port is taken, or reserved.
    """

    def __init__(
        self,
        paths: Callable[[], Mapping[str, Path]],
        open_view: Callable[[Path], RunView],
        list_runs: Callable[[], Mapping[str, object]],
        token: str,
        port: int = 0,
    ) -> None:
        self._paths = paths
        self._open_view = open_view
        self.list_runs = list_runs
        self._token = token
        self._views: dict[str, RunView] = {}
        self._lock = threading.Lock()
        try:
            self._http = _BoundedServer((_LOOPBACK, port), _handler_of(self))
        except OSError as error:
            raise ConfigurationError(
                f"port {port} of this machine cannot be used ({error.strerror}): take another --port, or leave it out "
                "for a free one"
            ) from error

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def address(self, run: str = "") -> str:
        """Return the address of the list of runs, or of one of them, with the token."""
        path = f"run/{quote(run, safe='')}/" if run else ""
        return f"http://{_LOOPBACK}:{self.port}/{path}?token={self._token}"

    def serve(self) -> None:
        """Answer requests until :meth:`close` is called from another thread."""
        self._http.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def has_several(self) -> bool:
        """Return whether there is a list of runs to go back to."""
        return len(self._paths()) > 1

    def admits(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def listed(self) -> dict[str, object]:
        """Return the list of runs, with what was found in those that this server has read."""
        with self._lock:
            views = dict(self._views)
        read = {name: told for name, view in views.items() if (told := view.told) is not None}
        return {**self.list_runs(), "read": read}

    def view(self, run: str) -> RunView | None:
        """Return a run that is read, or begin to read it; None if there is none of this name."""
        path = self._paths().get(run)
        if path is None:
            return None
        with self._lock:
            if run not in self._views:
                self._views[run] = self._open_view(path)
            return self._views[run]

    def read_again(self, run: str) -> bool:
        """Forget a run, so that the next request reads what was recorded meanwhile; return whether it was read."""
        with self._lock:
            return self._views.pop(run, None) is not None


def _handler_of(server: RunServer) -> type[BaseHTTPRequestHandler]:
    class PageHandler(_Handler):
        site = server

    return PageHandler


class _Handler(BaseHTTPRequestHandler):
    site: RunServer
    protocol_version = "HTTP/1.1"

    timeout = _SILENT_SECONDS
    """Seconds that a connection may be silent, also between requests."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a page asks for many resources."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that http.server refuses as all others."""
        self.close_connection = True
        self._text(HTTPStatus(code), message or HTTPStatus(code).phrase)

    # ---- what is answered

    def _answer(self, answer: Callable[[list[str], dict[str, list[str]]], None]) -> None:
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, max_num_fields=_MOST_FIELDS)
        except ValueError:
            self.close_connection = True
            self._text(HTTPStatus.BAD_REQUEST, "This is no address of this server.")
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or query.get("token", [""])[0]
        try:
            if self.site.admits(given):
                self._answer_or_explain(answer, [unquote(part) for part in address.path.strip("/").split("/")], query)
            else:
                self._text(HTTPStatus.FORBIDDEN, "Open the address that `commtrace view` printed, with its token.")
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the page was closed, or does not take its answer

    def _answer_or_explain(
        self,
        answer: Callable[[list[str], dict[str, list[str]]], None],
        parts: list[str],
        query: dict[str, list[str]],
    ) -> None:
        try:
            answer(parts, query)
        except CommtraceError as error:
            self._text(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error} (see the terminal)")

    def _get(self, parts: list[str], query: Mapping[str, list[str]]) -> None:
        match parts:
            case [""]:
                self._send(fill_page("commtrace", [], server="").encode(), "text/html; charset=utf-8")
            case ["data", "runs.json"]:
                self._send(json.dumps(self.site.listed(), allow_nan=False).encode(), "application/json")
            case ["run", name]:
                if self.site.view(name) is None:
                    self._no_run(name)
                else:
                    page = fill_page(f"commtrace · {name}", [], server=name, of_several=self.site.has_several)
                    self._send(page.encode(), "text/html; charset=utf-8")
            case ["run", name, "state"]:
                view = self.site.view(name)
                if view is None:
                    self._no_run(name)
                else:
                    self._send(json.dumps({"has_grown": view.has_grown()}).encode(), "application/json")
            case ["run", name, "data", *resource]:
                self._resource(name, "/".join(resource), _ranks(query))
            case _:
                self._text(HTTPStatus.NOT_FOUND, "There is nothing at this address.")

    def _post(self, parts: list[str], query: Mapping[str, list[str]]) -> None:
        match parts:
            case ["run", name, "read"]:
                self.site.read_again(name)
                self._send(b"{}", "application/json")
            case ["run", name, "whatif"]:
                self._what_if(name, Question.of_query(query))
            case _:
                self._text(HTTPStatus.NOT_FOUND, "There is nothing at this address.")

    def _resource(self, run: str, name: str, ranks: Collection[int] | None) -> None:
        view = self.site.view(run)
        if view is None:
            self._no_run(run)
            return
        found = view.resource(name, ranks)
        if found is None:
            self._send(b"", "text/plain", HTTPStatus.NO_CONTENT)  # no error: not every run has everything
        elif isinstance(found, Pending):
            self._send(json.dumps(found._asdict()).encode(), "application/json", HTTPStatus.ACCEPTED)
        else:
            self._send(found, _content_type(name))

    def _what_if(self, run: str, question: Question) -> None:
        view = self.site.view(run)
        if view is None:
            self._no_run(run)
            return
        answer = view.what_if(question)
        if answer is None:
            self._send(b"", "text/plain", HTTPStatus.NO_CONTENT)
        else:
            self._send(answer, "application/json")

    def _no_run(self, name: str) -> None:
        self._text(HTTPStatus.NOT_FOUND, f"There is no run {name} here. Open the list of runs.")

    # ---- how

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._send(text.encode("utf-8", "backslashreplace"), "text/plain; charset=utf-8", status)

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        headers = {"Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        # Without headers: of a request that could not be read.
        accepted = getattr(self, "headers", {}).get("Accept-Encoding", "")
        if len(content) >= _COMPRESSED_FROM and "gzip" in accepted:
            content = gzip.compress(content, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _content_type(resource: str) -> str:
    if resource.endswith("/perfetto"):
        return "application/octet-stream"
    return "application/json" if resource.endswith(".json") else "application/vnd.apache.arrow.stream"


def _ranks(query: Mapping[str, list[str]]) -> frozenset[int] | None:
    """Return the ranks of ``?ranks=0-3,8``; None if they are not limited."""
    if "ranks" not in query:
        return None
    ranks: set[int] = set()
    for part in query["ranks"][0].split(","):
        first, _, last = part.partition("-")
        if not (_RANK.fullmatch(first) and (not last or _RANK.fullmatch(last))):
            raise ConfigurationError(f"ranks={query['ranks'][0][:80]}: write numbers and ranges, like 0-3,8")
        ranks.update(range(int(first), min(int(last or first), MOST_RANKS) + 1))
    return frozenset(ranks)
