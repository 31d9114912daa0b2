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
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshwright.errors import UserError
from meshwright.record.run_folder import is_run, runs_in
from meshwright.show.page_file import PageScripts, page
from meshwright.watch.report import RunReport

FOLDER = Path(__file__).parent / "page"
WATCH = PageScripts(FOLDER / "panels.js", FOLDER / "more_panels.js", FOLDER / "main.js")


HOSTS = ("127.0.0.1", "localhost", "[::1]")


MOST_RUNS = 32  # The newest runs of a folder that are shown.


class Runs:
    """The runs shown on a page. A lock lets one request at a time read their folders.

    `collections` are folders of runs. Runs that begin there later are added, always at the end.
    """

    def __init__(
        self, reports: Sequence[RunReport], collections: Sequence[Path] = (), cluster: str | None = None
    ) -> None:
        self.reports, self.collections, self.cluster = list(reports), tuple(collections), cluster
        self._lock = threading.Lock()
        self._find()

    @classmethod
    def of(cls, folders: Sequence[Path], cluster: str | None = None) -> Runs:
        """Return the runs in these folders: each is a run, or holds runs."""
        collections = [folder for folder in folders if not is_run(folder) and runs_in(folder)]
        return cls(
            [RunReport(folder, cluster) for folder in folders if folder not in collections], collections, cluster
        )

    def _find(self) -> None:
        """Add the runs that have begun in the collections."""
        if not self.collections:
            return
        known = {report.path for report in self.reports}
        for folder in (folder for place in self.collections for folder in runs_in(place)[:MOST_RUNS]):
            if folder not in known and len(self.reports) < MOST_RUNS:
                # One damaged run must not hide the others.
                with suppress(UserError, OSError):
                    self.reports.append(RunReport(folder, self.cluster))

    def documents(self) -> list[dict[str, Any]]:
        """Return the document of every run, with the settings in which they differ."""
        with self._lock:
            self._find()
            found = [report.document() for report in self.reports]
        settings = [document["settings"] for document in found]
        keys = dict.fromkeys(key for each in settings for key in each)
        differing = [key for key in keys if len({each.get(key) for each in settings}) > 1 and key != "run.dir"]
        for document, each in zip(found, settings, strict=True):
            document["settings"] = {key: each.get(key, "") for key in differing}
        return found

    def plan(self, run: int) -> dict[str, Any]:
        with self._lock:
            return self.reports[run].plan()

    def plans(self) -> list[dict[str, Any]]:
        with self._lock:
            return [report.plan() for report in self.reports]

    def version(self) -> str:
        return f"{hash(tuple(report.version() for report in self.reports)) & 0xFFFFFFFFFFFF:x}"

    def flight(self, run: int, rank: int) -> dict[str, Any]:
        return self.reports[run].flight(rank)

    @property
    def title(self) -> str:
        if self.collections:
            return ", ".join(folder.resolve().name for folder in self.collections)
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
            elif url.path in ("/plan.json", "/flight.json"):
                try:
                    query = {name: int(values[0]) for name, values in parse_qs(url.query).items()}
                    run, rank = query["run"], max(0, query.get("rank", 0))
                except (KeyError, ValueError):
                    run, rank = -1, 0
                if not 0 <= run < len(runs.reports):
                    self._send(HTTPStatus.BAD_REQUEST, "text/plain", b"the request names no run and rank\n")
                elif url.path == "/plan.json":
                    self._send_json(lambda: runs.plan(run), None)
                else:
                    self._send_json(lambda: runs.flight(run, rank), None)
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
