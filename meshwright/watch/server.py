"""Serves the page of some runs to this machine alone, without importing torch.

The server listens on a loopback address and answers only requests whose host is one. So another site's web page whose
domain name resolves to this address (DNS rebinding) gets nothing. There are four paths, and none of them names a file.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshwright.errors import UserError
from meshwright.show.page_file import PageScripts, page
from meshwright.watch.report import RunReport

FOLDER = Path(__file__).parent / "page"
WATCH = PageScripts(FOLDER / "panels.js", FOLDER / "more_panels.js", FOLDER / "main.js")


HOSTS = ("127.0.0.1", "localhost", "[::1]")


class Runs:
    """The runs shown on a page. A lock lets one request at a time read their folders."""

    def __init__(self, reports: Sequence[RunReport]) -> None:
        self.reports, self._lock = list(reports), threading.Lock()

    def documents(self) -> list[dict[str, Any]]:
        with self._lock:
            return [report.document() for report in self.reports]

    def plans(self) -> list[dict[str, Any]]:
        with self._lock:
            return [report.plan() for report in self.reports]

    def version(self) -> str:
        return f"{hash(tuple(report.version() for report in self.reports)) & 0xFFFFFFFFFFFF:x}"

    def flight(self, run: int, rank: int) -> dict[str, Any]:
        return self.reports[run].flight(rank)

    @property
    def title(self) -> str:
        return ", ".join(report.path.resolve().name for report in self.reports)


def whole_page(runs: Runs) -> str:
    """Return the page as a single file that works without the server: it also contains the ranks' last calls."""
    documents, plans = runs.documents(), runs.plans()
    # At most 64 ranks of each run, to limit the size of the file.
    flights = [
        {str(rank): runs.flight(number, rank) for rank in document["ranks"].get("flight", [])[:64]}
        for number, document in enumerate(documents)
    ]
    return page(runs.title, {"runs": documents, "plans": plans, "flights": flights}, WATCH)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, runs: Runs, port: int) -> None:
        self.runs = runs
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a request, except if the browser closed the connection during the answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "meshwright", ""

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the log lines that the base class would write to stderr for every request."""

    def do_GET(self) -> None:
        if not self._is_local():
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for its own machine alone\n")
            return
        url = urlsplit(self.path)
        runs = self.server.runs
        try:
            if url.path == "/":
                data = {"runs": runs.documents()}
                self._send(HTTPStatus.OK, "text/html", page(runs.title, data, WATCH, live=True).encode())
            elif url.path == "/data.json":
                self._send_json(lambda: runs.documents(), runs.version())
            elif url.path == "/plans.json":
                self._send_json(lambda: runs.plans(), None)
            elif url.path == "/flight.json":
                try:
                    query = {name: int(values[0]) for name, values in parse_qs(url.query).items()}
                    run, rank = query["run"], max(0, query["rank"])
                except (KeyError, ValueError):
                    run, rank = -1, 0
                if 0 <= run < len(runs.reports):
                    self._send_json(lambda: runs.flight(run, rank), None)
                else:
                    self._send(HTTPStatus.BAD_REQUEST, "text/plain", b"the request names no run and rank\n")
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")
        except (UserError, OSError) as error:
            # The folder is gone or half written. The page asks again later.
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())

    def _is_local(self) -> bool:
        """Return True if both the host and the origin, if one is given, are this server's loopback address."""
        port = self.server.server_address[1]
        allowed = {f"{host}:{port}" for host in HOSTS}
        origin = self.headers.get("Origin")
        own = origin is None or origin.removeprefix("http://") in allowed
        return self.headers.get("Host", "") in allowed and own

    def _send_json(self, make: Any, version: str | None) -> None:
        if version is not None and self.headers.get("If-None-Match") == version:
            self._send(HTTPStatus.NOT_MODIFIED, "application/json", b"", version)
            return
        self._send(HTTPStatus.OK, "application/json", json.dumps(make(), allow_nan=False).encode(), version)

    def _send(self, status: HTTPStatus, kind: str, body: bytes, version: str | None = None) -> None:
        packed = len(body) > 1 << 16 and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if packed else body
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "Content-Security-Policy": WATCH.policy, "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        headers |= {"Content-Encoding": "gzip"} if packed else {}
        headers |= {"ETag": version} if version else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
