"""Export the sums of a rank's steps at an endpoint for Prometheus, or in a file for node-exporter."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.registry import Collector

from commtrace.config import Config, FilePath
from commtrace.errors import ConfigurationError
from commtrace.exporters.prometheus.metrics import RankCollector, StepCounters
from commtrace.live.rank import LiveRank
from commtrace.live.summary import StepListener, StepSummary
from commtrace.trace.schema import Row

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_logger = logging.getLogger("commtrace")

_CLIENT_SECONDS: Final = 10.0
"""A client that is silent for so long is disconnected."""


class Endpoint:
    """Serves the samples of a collector from a thread, at the configured port plus the local rank, or a free one.

    Raises:
        ConfigurationError: it cannot listen, or a file that it needs cannot be used.
    """

    def __init__(self, config: Config, local_rank: int, collector: Collector) -> None:
        _check_tls(config)
        authorization = _authorization(config)
        registry = CollectorRegistry(auto_describe=False)
        wanted = config.prometheus.port + local_rank if config.prometheus.port else 0
        try:
            self._server, self._thread = start_http_server(
                wanted,
                config.prometheus.address,
                registry,
                _path_or_none(config.prometheus.certfile),
                _path_or_none(config.prometheus.keyfile),
                _path_or_none(config.prometheus.client_cafile),
                client_auth_required=bool(config.prometheus.client_cafile),
            )
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"cannot listen on {config.prometheus.address}:{wanted} for Prometheus ({error}). Leave "
                "COMMTRACE_PROMETHEUS_PORT away for a free port, or choose one that is free together with as many "
                "behind it as the node has ranks"
            ) from error
        self._server.RequestHandlerClass = _impatient(self._server.RequestHandlerClass)
        if config.prometheus.certfile:
            listening: Any = self._server.socket
            # TLS handshakes happen on the request's thread. A silent client, such as a port scanner, would otherwise
            # block the thread that accepts all others, and with it the end of the job.
            listening.do_handshake_on_connect = False
        if authorization:
            app = self._server.get_app()
            assert app is not None, "start_http_server sets one"
            self._server.set_app(_with_authorization(app, authorization))
        # Only now, when clients must authenticate.
        registry.register(collector)
        self.address = config.prometheus.address
        self.port = int(self._server.server_port)
        self.scheme = "https" if config.prometheus.certfile else "http"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)

    def abandon_after_fork(self) -> None:
        """Close the copy of the listening socket, which would keep the parent's port in use after its end."""
        self._server.socket.close()


def _impatient(handler: Any) -> Any:
    """Return a handler that drops silent clients and leaves no tracebacks in the rank's log."""

    class MetricsHandler(handler):  # type: ignore[misc]
        timeout = _CLIENT_SECONDS

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # it timed out, has gone, or does not speak TLS
                super().handle()

    return MetricsHandler


def _path_or_none(option: FilePath) -> str | None:
    return os.fspath(option) or None


def _check_tls(config: Config) -> None:
    # Before a port is taken: prometheus-client leaves it open if the files cannot be used.
    if not config.prometheus.certfile:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.prometheus.certfile, config.prometheus.keyfile)
        if config.prometheus.client_cafile:
            context.load_verify_locations(config.prometheus.client_cafile)
    except OSError as error:
        files = [config.prometheus.certfile, config.prometheus.keyfile, config.prometheus.client_cafile]
        raise ConfigurationError(
            f"{', '.join(str(path) for path in files if path)}: cannot be used for TLS ({error})"
        ) from error


def _authorization(config: Config) -> str:
    """Return the header that clients must send; empty if anybody may read."""
    if not config.prometheus.auth_file:
        return ""
    try:
        secret = Path(config.prometheus.auth_file).read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"COMMTRACE_PROMETHEUS_AUTH_FILE cannot be read: {error}") from error
    if ":" not in secret or "\n" in secret:
        raise ConfigurationError(f"{config.prometheus.auth_file}: write one line, USER:PASSWORD")
    return "Basic " + base64.b64encode(secret.encode()).decode()


def _with_authorization(app: WSGIApplication, authorization: str) -> WSGIApplication:
    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", ""))
        if hmac.compare_digest(given.encode(), authorization.encode()):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="commtrace"')])
        return [b"credentials are needed\n"]

    return guarded


_EVERYWHERE: Final = ("", "0.0.0.0", "::")
_OF_RANK: Final = re.compile(r"rank-(\d{5,})\.json$")


class TargetFile:
    """The target file of one rank, in ``chosen``, perhaps shared by several runs, or in the run's directory."""

    def __init__(self, chosen: str, rank: LiveRank) -> None:
        self.directory = Path(chosen) if chosen else rank.directory / "prometheus"
        self._prefix = f"{file_name(rank.run_id)}-" if chosen else ""
        self.path = self.directory / f"{self._prefix}rank-{rank.rank:05d}.json"
        self._written: Mapping[str, str] | None = None
        if rank.rank == 0:
            self._remove_files_of_more_ranks(rank.metadata.world_size)

    def write(self, target: str, labels: Mapping[str, str]) -> None:
        """Write the file if the labels changed; ``target`` is ``host:port``."""
        if labels == self._written:
            return
        self._written = labels
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps([{"targets": [target], "labels": labels}], indent=1) + "\n")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _remove_files_of_more_ranks(self, world_size: int) -> None:
        for path in self.directory.glob(f"{self._prefix}rank-*.json"):
            match = _OF_RANK.fullmatch(path.name.removeprefix(self._prefix))
            if match and int(match[1]) >= world_size:
                path.unlink(missing_ok=True)


def reachable(address: str, port: int) -> str:
    """Return the ``host:port`` at which others reach this address."""
    host = socket.gethostname() if address in _EVERYWHERE else address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def file_name(run_id: str) -> str:
    """Return a run's name as part of a file's name."""
    return re.sub(r"[^\w.-]", "_", run_id)


def replace_file(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


SECONDS_BETWEEN: Final = 1.0
"""Shortest time between two versions of the file."""

_LONGEST_SECONDS: Final = 15.0
"""Longest time between them, also while no step ends."""


class Textfile:
    """Keeps a ``.prom`` file in node-exporter's directory up to date, from a thread, as disks may block."""

    def __init__(self, path: Path, collector: Collector) -> None:
        self.path = path
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commtrace-textfile", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Request a new version of the file."""
        self._news.set()

    def close(self) -> None:
        """Stop, and remove the file, which node-exporter would otherwise export for ever."""
        self._closing.set()
        self._news.set()
        self._thread.join(1.0)
        self.path.unlink(missing_ok=True)

    def abandon_after_fork(self) -> None:
        """Do nothing: the thread and the file are the parent's."""

    def _run(self) -> None:
        failed = False
        while not self._closing.is_set():
            # Without news as well: hangs are noticed between steps, and an old file is that of a rank that was killed.
            self._news.wait(_LONGEST_SECONDS)
            self._news.clear()
            if self._closing.is_set():
                return
            try:
                write_to_textfile(str(self.path), self._registry)
                failed = False
            except OSError as error:
                if not failed:
                    _logger.warning(
                        "commtrace: cannot write %s (%s); set COMMTRACE_PROMETHEUS_TEXTFILE to the directory that "
                        "node-exporter reads, and let this user write to it",
                        self.path,
                        error,
                    )
                failed = True
            self._closing.wait(SECONDS_BETWEEN)


def open_prometheus(config: Config, rank: LiveRank) -> StepListener:
    """Return the configured exporter; raise :class:`ConfigurationError` if it cannot listen."""
    return TextfileExporter(config, rank) if config.prometheus.textfile else EndpointExporter(config, rank)


class EndpointExporter:
    """An endpoint for Prometheus, and its target file, written with the first step, when the topology is known."""

    def __init__(self, config: Config, rank: LiveRank) -> None:
        self._rank = rank
        self._totals = StepCounters()
        collector = RankCollector(rank, self._totals, identity=config.prometheus.identity)
        self.endpoint = Endpoint(config, rank.metadata.local_rank, collector)
        self._target = TargetFile(os.fspath(config.prometheus.targets), rank)
        self._target_failed = False

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        self._totals.add(summary)
        labels = self._rank.identity()
        if self.endpoint.scheme != "http":
            labels["__scheme__"] = self.endpoint.scheme
        try:
            self._target.write(reachable(self.endpoint.address, self.endpoint.port), labels)
        except OSError as error:
            if not self._target_failed:
                self._target_failed = True
                _logger.warning(
                    "commtrace: cannot write the target file %s (%s); Prometheus can still scrape port %d",
                    self._target.path,
                    error,
                    self.endpoint.port,
                )

    def close(self) -> None:
        self._target.remove()
        self.endpoint.close()

    def abandon_after_fork(self) -> None:
        self.endpoint.abandon_after_fork()


class TextfileExporter:
    """A file for node-exporter; its samples carry the labels of the rank."""

    def __init__(self, config: Config, rank: LiveRank) -> None:
        self._totals = StepCounters()
        collector = RankCollector(rank, self._totals, identity=True)
        name = f"commtrace-{file_name(rank.run_id)}-rank-{rank.rank:05d}.prom"
        self.textfile = Textfile(Path(config.prometheus.textfile) / name, collector)

    def step(self, summary: StepSummary, rows: Sequence[Row]) -> None:
        self._totals.add(summary)
        self.textfile.update()

    def close(self) -> None:
        self.textfile.close()

    def abandon_after_fork(self) -> None:
        self.textfile.abandon_after_fork()
