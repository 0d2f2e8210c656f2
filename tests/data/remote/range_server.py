"""A web server on loopback that gives ranges of files, counts what it sends, and fails as it is told.

    python tests/data/remote/range_server.py FOLDER [--failing 0.05] [--delay 0.02]

prints its URL; `GET /-/counts` answers how many requests and bytes there were.
"""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import http.server
import itertools
import json
import os
import random
import re
import threading
import time
from pathlib import Path

KINDS = ("error", "cut", "stall")


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder.

    Args:
        folder: What is served.
        failing: Part of the answers that fail, in turn with status 500, a connection that is cut, and a stall.
        stall: Seconds that a stalled answer hangs.
        delay: Seconds before each answer, as a network has them.
        ranges: "all"; "no suffix": "the last N bytes" is answered by 400; "none": whole files only.
        etag: Whether answers name the version of the file.
        head: Whether HEAD is allowed.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder, failing=0.0, stall=3.0, delay=0.0, ranges="all", etag=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = Path(folder)
        self.failing = failing
        self.kinds = KINDS
        self.stall = stall
        self.delay = delay
        self.ranges = ranges
        self.etag = etag
        self.refused = None  # status with which all is answered
        self.headers = {}  # what a request must have
        self.asked = []  # (path, range) of each request
        self.sent = 0
        self.failures = 0
        self.draw = random.Random(0)
        self.turn = itertools.count()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Clients go away; that is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.answer(405)  # as for URLs that are signed for GET

    def do_GET(self):
        server = self.server
        if self.path == "/-/counts":
            return self.answer(200, json.dumps({"requests": len(server.asked), "bytes": server.sent}).encode())
        time.sleep(server.delay)
        with server.lock:
            server.asked.append((self.path, self.headers.get("Range")))
            fails = server.draw.random() < server.failing
            if fails:
                kind = server.kinds[next(server.turn) % len(server.kinds)]
                server.failures += 1
        if fails and kind == "error":
            return self.answer(500)
        if fails and kind == "stall":
            time.sleep(server.stall)
            self.close_connection = True
            return None
        if server.refused is not None:
            return self.answer(server.refused)
        if any(self.headers.get(name) != value for name, value in server.headers.items()):
            return self.answer(401)
        path = server.folder / self.path.partition("?")[0].lstrip("/")
        if path.is_dir():
            links = "".join(f'<a href="{one.name}">{one.name}</a>' for one in sorted(path.iterdir()))
            return self.answer(200, f"<html>{links}</html>".encode(), {"Content-Type": "text/html"})
        if not path.is_file():
            return self.answer(404)
        return self.file(path, cut=fails)

    def file(self, path, cut):
        server = self.server
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            size = found.st_size
            headers = {"Accept-Ranges": "bytes"}
            if server.etag:
                headers["ETag"] = f'"{size:x}-{found.st_mtime_ns:x}"'
            else:
                headers["Last-Modified"] = email.utils.formatdate(found.st_mtime, usegmt=True)
            wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
            if wanted is None or server.ranges == "none":
                return self.answer(200, file.read(), headers)
            if not wanted[1] and server.ranges == "no suffix":
                return self.answer(400)
            start = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
            end = min(int(wanted[2]) + 1, size) if wanted[1] and wanted[2] else size
            if start >= size:
                return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
            file.seek(start)
            body = file.read(end - start)
        return self.answer(206, body, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}, cut)

    def answer(self, status, body=b"", headers=None, cut=False):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if cut:
            body, self.close_connection = body[: len(body) // 2], True
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        with self.server.lock:
            self.server.sent += len(body)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--failing", type=float, default=0.0)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    server = Server(options.folder, failing=options.failing, delay=options.delay)
    print(server.url, flush=True)
    server.thread.join()


if __name__ == "__main__":
    main()
