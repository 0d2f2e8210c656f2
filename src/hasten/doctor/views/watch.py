"""A local web page of a run that is going on: read-only, on 127.0.0.1, behind a token.

What a web page of a stranger could do to a server on this machine is closed off: the Host header must name this
server (DNS rebinding), every answer needs the token (other users of the machine, other pages), nothing but GET and
HEAD is answered, and nothing that a request says reaches the file system.
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

_MOST_CONNECTIONS = 16  # at once; a page needs one
_SLOWEST_REQUEST = 10.0  # seconds until a client that says nothing is let go

Answer = tuple[str, str]  # content type and text


class Watch:
    """A server for one page and what it shows.

    Args:
        body: Gives the page's `<main>` as HTML, again each time; called once a second for each open page.
        state: Gives the same as JSON text, for programs.
        page: The page around them: a function of the first body.
        port: 0 for one that is free.

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
        """The address to open, with the token."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """Name of the cookie that keeps the token; cookies do not tell ports apart, so it says which."""
        return f"hasten-watch-{self.port}"

    def hosts(self) -> set[str]:
        """The Host headers that name this server."""
        return {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}

    def serve(self) -> None:
        """Answer until `close` is called."""
        self._server.serve_forever(poll_interval=0.2)

    def start(self) -> threading.Thread:
        """Answer in a thread of its own."""
        thread = threading.Thread(target=self.serve, name="hasten-watch", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> Answer | None:
        """Return what is at a path; None where nothing is."""
        give = self._answers.get(path)
        return give() if give is not None else None


def script() -> str:
    """The page's only script: it asks for the body again and puts in what has changed."""
    return (TEMPLATES / "watch.js").read_text(encoding="utf-8")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    watch: Watch

    def __init__(self, *args: Any) -> None:
        self._connected: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; the oldest connection makes room where there are too many, as with slow strangers."""
        with self._lock:
            self._connected.append(request)
            too_many = self._connected[:-_MOST_CONNECTIONS]
        for oldest in too_many:
            with contextlib.suppress(OSError):  # it has gone by itself
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that is over."""
        with self._lock:
            if request in self._connected:
                self._connected.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show nothing: a request that breaks off or is no HTTP is a stranger's matter, not the person's."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "hasten"
    sys_version = ""
    timeout = _SLOWEST_REQUEST

    def do_GET(self) -> None:
        """Answer what is asked, if it may be."""
        watch = self.server.watch
        try:
            asked = urlsplit(self.path)
        except ValueError as error:  # `//[`
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        if self.headers.get("Host", "") not in watch.hosts():
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to 127.0.0.1 and localhost only")
            return
        given = parse_qs(asked.query).get("token", [""])[0]
        if given and _same(given, watch.token) and asked.path == "/":
            self._head(HTTPStatus.SEE_OTHER, "text/plain", 0, {"Location": "/", "Set-Cookie": self._cookie()})
            return
        if not any(_same(word, watch.token) for word in (given, self._kept(), self._bearer())):
            self._refuse(
                HTTPStatus.FORBIDDEN, "the token is missing or wrong: open the address that hasten watch printed"
            )
            return
        try:
            answer = watch.answer(asked.path)
        except Exception as error:  # the page says what went wrong, and is asked again in a second
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

    def _kept(self) -> str:
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.watch.cookie)
        except CookieError:  # a cookie of another program on this host
            return ""
        return morsel.value if morsel is not None else ""

    def _bearer(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, "text/plain", f"{why}\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode("utf-8", "replace")
        self._head(status, kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, length: int, more: dict[str, str] | None = None) -> None:
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
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to the person, and the request's path holds the token."""


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
