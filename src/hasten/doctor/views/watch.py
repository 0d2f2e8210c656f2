"""Serve a local web page of a run in progress: read-only, on 127.0.0.1, protected by a token.

Any web page that is open in the user's browser can send requests to this server, and so can other users of the machine.
Therefore the Host header must name this server (against DNS rebinding), every request needs the token, only GET and
HEAD are answered, and no part of a request reaches the file system.

The token comes in the URL once; the server then moves it into a cookie and redirects, so that it does not stay in the
address bar.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hasten.doctor.views import TEMPLATES
from hasten.errors import HastenError

_MOST_CONNECTIONS = 16  # open at once; a page needs one
_SLOWEST_REQUEST = 10.0  # seconds after which a silent client is disconnected

Answer = tuple[str, str]  # content type and text


class Watch:
    """A server for one live page.

    Args:
        body: Returns the content of the page's `<main>` as HTML; called once a second for each open page.
        state: Returns the same as JSON text, for programs.
        page: Returns the whole page from the first body.
        port: The port; 0 for any free port.

    Raises:
        HastenError: The port is taken.
    """

    def __init__(
        self, body: Callable[[], str], state: Callable[[], str], page: Callable[[str], str], port: int = 0
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self._answers: dict[str, Callable[[], Answer]] = {
            "/": lambda: ("text/html", page(body())),
            "/body": lambda: ("text/html", body()),
            "/state": lambda: ("application/json", state()),
            "/watch.js": lambda: ("text/javascript", script()),
        }
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise HastenError(f"cannot listen on 127.0.0.1:{port}: {error.strerror}", "choose another --port") from None
        self._server.watch = self
        self.port: int = self._server.server_address[1]

    @property
    def url(self) -> str:
        """The URL to open, with the token."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """The name of the cookie with the token; it contains the port, since servers on other ports share cookies."""
        return f"hasten-watch-{self.port}"

    def hosts(self) -> set[str]:
        """Return the Host headers that name this server."""
        return {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}

    def serve(self) -> None:
        """Answer requests until `close` is called."""
        self._server.serve_forever(poll_interval=0.2)

    def start(self) -> threading.Thread:
        """Answer requests in a separate daemon thread, and return it."""
        thread = threading.Thread(target=self.serve, name="hasten-watch", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Stop answering and close the socket."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> Answer | None:
        """Return the answer for a path; None if there is nothing at it."""
        respond = self._answers.get(path)
        return respond() if respond is not None else None


def script() -> str:
    """Return the page's only script, which requests the body every second and replaces what has changed."""
    return (TEMPLATES / "watch.js").read_text(encoding="utf-8")


class _Server(ThreadingHTTPServer):
    """A threading server that limits the number of open connections."""

    daemon_threads = True
    allow_reuse_address = True
    watch: Watch

    def __init__(self, *args: Any) -> None:
        self._connected: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. If there are too many connections, as of slow or hostile clients, close the oldest."""
        with self._lock:
            self._connected.append(request)
            too_many = self._connected[:-_MOST_CONNECTIONS]
        for oldest in too_many:
            with contextlib.suppress(OSError):  # its client has closed it already
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            if request in self._connected:
                self._connected.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: aborted requests and requests that are not HTTP do not concern the user."""


class _Handler(BaseHTTPRequestHandler):
    """Checks a request's Host header and token, and answers it."""

    server: _Server
    server_version = "hasten"
    sys_version = ""
    timeout = _SLOWEST_REQUEST

    def do_GET(self) -> None:
        """Answer a GET or HEAD request, or refuse it."""
        watch = self.server.watch
        try:
            url = urlsplit(self.path)
        except ValueError as error:  # as for the path `//[`
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        if self.headers.get("Host", "") not in watch.hosts():
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to 127.0.0.1 and localhost only")
            return
        in_url = parse_qs(url.query).get("token", [""])[0]
        if in_url and _same(in_url, watch.token) and url.path == "/":  # move the token from the URL into a cookie
            self._head(HTTPStatus.SEE_OTHER, "text/plain", 0, {"Location": "/", "Set-Cookie": self._cookie()})
            return
        if not any(_same(token, watch.token) for token in (in_url, self._cookie_token(), self._bearer())):
            self._refuse(
                HTTPStatus.FORBIDDEN, "the token is missing or wrong: open the address that hasten watch printed"
            )
            return
        try:
            answer = watch.answer(url.path)
        except Exception as error:  # the page shows the error and asks again in a second, when it may be over
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{type(error).__name__}: {error}")
            return
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
            return
        kind, text = answer
        self._send(HTTPStatus.OK, kind, text)

    def _only_reading(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this server is read-only")

    do_HEAD = do_GET  # noqa: N815 (the names are http.server's)
    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _only_reading  # noqa: N815

    def _cookie(self) -> str:
        return f"{self.server.watch.cookie}={self.server.watch.token}; HttpOnly; SameSite=Lax; Path=/"

    def _cookie_token(self) -> str:
        """Return the token in the request's cookie; "" if there is none."""
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.watch.cookie)
        except CookieError:  # another program on this host has set a cookie that Python cannot parse
            return ""
        return morsel.value if morsel is not None else ""

    def _bearer(self) -> str:
        """Return the token in the Authorization header, for programs; "" if there is none."""
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send(status, "text/plain", f"{reason}\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode("utf-8", "replace")
        self._head(status, kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, length: int, extra_headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(length),
            "Cache-Control": "no-store",
            "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
            "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **(extra_headers or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests would clutter the terminal, and a request's path may contain the token."""


def _same(candidate: str, token: str) -> bool:
    """Compare in constant time, so that timing does not reveal the token."""
    return hmac.compare_digest(candidate.encode("utf-8", "replace"), token.encode())
