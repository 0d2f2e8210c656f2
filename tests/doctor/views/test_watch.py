"""The server behind `hasten watch`: who may read, and that nobody can do more."""

from __future__ import annotations

import http.client
import os
import socket
import struct
import threading
import time

import pytest

from hasten.doctor.views.following import FollowedRun
from hasten.doctor.views.watch import Watch
from hasten.errors import HastenError


@pytest.fixture
def watch():
    served = Watch(lambda: "<p>step 12</p>", lambda: '{"steps": 12}', lambda body: f"<main>{body}</main>")
    served.start()
    yield served
    served.close()


def ask(watch: Watch, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", watch.port, timeout=10)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=sent)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {key.lower(): value for key, value in answer.getheaders()}
    connection.close()
    return found


def test_the_address_gives_a_cookie_and_the_cookie_gives_the_page(watch: Watch) -> None:
    status, text, headers = ask(watch, watch.url.removeprefix(f"http://127.0.0.1:{watch.port}"))
    assert (status, text, headers["location"]) == (303, "", "/")
    assert "HttpOnly" in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert ask(watch, "/", Cookie=cookie)[:2] == (200, "<main><p>step 12</p></main>")
    assert ask(watch, "/body", Cookie=f"other=1; {cookie}")[1] == "<p>step 12</p>"
    assert ask(watch, "/state", Authorization=f"Bearer {watch.token}")[1] == '{"steps": 12}'


@pytest.mark.parametrize("path", ["/", "/body", "/state", "/watch.js", "/?token=", "/?token=guess", "/body?token=%ff"])
def test_without_the_token_nothing_is_told(watch: Watch, path: str) -> None:
    status, text, _ = ask(watch, path)
    assert status == 403
    assert "token" in text
    assert "12" not in text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:80", ""])
def test_another_host_name_is_refused_even_with_the_token(watch: Watch, host: str) -> None:
    status, text, headers = ask(watch, f"/?token={watch.token}", Host=host)
    assert status == 421
    assert "set-cookie" not in headers
    assert "step" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_read_only(watch: Watch, method: str) -> None:
    assert ask(watch, "/body", method, Authorization=f"Bearer {watch.token}")[0] == 405


def test_no_file_can_be_asked_for(watch: Watch) -> None:
    for path in ("/../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/watch.js/../x"):
        assert ask(watch, path, Authorization=f"Bearer {watch.token}")[0] == 404


def test_the_page_may_load_nothing_from_elsewhere_nor_be_framed(watch: Watch) -> None:
    policy = ask(watch, "/", Authorization=f"Bearer {watch.token}")[2]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


def test_a_run_that_cannot_be_read_is_said_and_asked_again() -> None:
    def broken() -> str:
        raise HastenError("no evidence at runs/today")

    served = Watch(broken, broken, lambda body: body)
    served.start()
    try:
        status, text, _ = ask(served, "/body", Authorization=f"Bearer {served.token}")
    finally:
        served.close()
    assert status == 503
    assert "no evidence at runs/today" in text


def test_a_taken_port_is_named(watch: Watch) -> None:
    with pytest.raises(HastenError, match=f"127.0.0.1:{watch.port}"):
        Watch(lambda: "", lambda: "", str, port=watch.port)


def test_it_listens_on_the_loopback_only(watch: Watch) -> None:
    assert watch._server.server_address[0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", watch.port), timeout=5):
        pass


STRANGE = (
    b"GET //[ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\xff\xfe\r\n\r\n",
    b"GET / HTTP/9.x\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n",
    b"GET / HTTP/1.1\r\nCookie: \xff=\xfe\r\nAuthorization: Bearer \xed\xa0\x80\r\nHost: \xff\r\n\r\n",
    b"",
)


@pytest.mark.parametrize("resets", [False, True])
def test_what_strangers_send_is_not_shown(watch: Watch, capfd: pytest.CaptureFixture[str], resets: bool) -> None:
    for request in STRANGE:
        with socket.create_connection(("127.0.0.1", watch.port), timeout=5) as stranger:
            if resets:  # closing answers with a reset instead of a goodbye
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.sendall(request)
            if not resets:
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass
    assert ask(watch, "/body", Authorization=f"Bearer {watch.token}")[0] == 200
    time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


def test_slow_strangers_take_few_threads_and_do_not_lock_the_person_out(watch: Watch) -> None:
    before = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", watch.port), timeout=5) for _ in range(60)]
    for stranger in slow:
        stranger.sendall(b"GET / HT")
    assert ask(watch, "/body", Authorization=f"Bearer {watch.token}")[0] == 200
    deadline = time.monotonic() + 5
    while threading.active_count() - before > 16 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() - before <= 16
    for stranger in slow:
        stranger.close()


def test_a_pipe_among_the_files_is_passed_over(tmp_path) -> None:
    os.mkfifo(tmp_path / "evidence.live.json")
    os.mkfifo(tmp_path / "evidence.json")
    assert "no run to be seen" in FollowedRun(tmp_path).body()
    assert "no run to be seen" in FollowedRun(tmp_path / "evidence.json").body()
