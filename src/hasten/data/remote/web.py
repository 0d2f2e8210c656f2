"""Files on web servers. Each response is checked for its range, its length and the file's version."""

from __future__ import annotations

import asyncio
import fnmatch
import re
import time
from collections import deque
from typing import Any

from hasten.data.remote.options import RemoteError
from hasten.data.remote.retries import PassingError
from hasten.data.remote.stores import SLOWEST, TAIL, Stamp, Store, changed, missing_file, refused, shown

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\s*")
_PASSING = (408, 425, 429)  # status codes worth a retry, in addition to those from 500 on
_TWICE = 0.04  # share of requests that may be sent twice, so that fetched bytes stay below 1.1 times those used
_LATE = 0.5  # seconds within which no response counts as late
_KNOWN = 4  # responses after which the usual time is known
_NO_SUFFIX = (200, 400, 416, 501)  # responses of servers that do not support "the last N bytes"


class WebStore(Store):
    """Files at http and https URLs, read through fsspec's aiohttp session."""

    def _reset(self) -> None:
        super()._reset()
        self._took: deque[float] = deque(maxlen=64)  # seconds of the latest responses
        self._requests = self._twice = 0

    def options(self) -> dict[str, Any]:
        """Return the user's options, with proxies and passwords taken from the environment, as curl does."""
        own = super().options()
        return {**own, "client_kwargs": {"trust_env": True, **own.get("client_kwargs", {})}}

    def opened(self, url: str) -> tuple[Stamp, bytes]:
        """Return the file's version and its last bytes, by one request.

        It uses no HEAD request, which URLs signed for GET refuse.

        Raises:
            RemoteError: The file cannot be read, or the server does not support ranges.
        """
        status, headers, body = self.tried(url, lambda: self._ask(url, f"-{TAIL}", TAIL))
        if status in _NO_SUFFIX:  # ask for the first byte instead, only to learn the size; the caller reads the footer
            status, headers, body = self.tried(url, lambda: self._ask(url, "0-0", 1))
            body = b""
        part = _RANGE.fullmatch(headers.get("Content-Range", ""))
        if status == 416:
            raise RemoteError(f"{shown(url)} is empty", "check the file: a Parquet file has a footer")
        if status != 206 or part is None:
            raise RemoteError(
                f"the server of {shown(url)} gives whole files only: it answered {status} when asked for a range",
                "serve the files by one that gives ranges (nginx, Apache, an object store), or copy them here",
            )
        return Stamp(int(part[3]), _mark(headers)), body

    def _fetched(self, url: str, stamp: Stamp, start: int, end: int) -> bytes:
        status, headers, body = self._ask(url, f"{start}-{end - 1}", end - start)
        if status in (412, 416):
            raise changed(url, stamp)
        part = _RANGE.fullmatch(headers.get("Content-Range", ""))
        if status != 206 or part is None:
            raise PassingError(f"the server answered {status} without the range that was asked for")
        now = Stamp(int(part[3]), _mark(headers))
        if now != stamp:
            raise changed(url, stamp, now)
        if (int(part[1]), int(part[2]) + 1) != (start, end) or len(body) != end - start:
            raise PassingError(f"bytes {part[1]}-{part[2]} came ({len(body):,}), in place of {start}-{end - 1}")
        return body

    def listed(self, url: str) -> list[str]:
        """Return the sorted URLs of a folder's or pattern's files, from the links on the folder's page.

        Raises:
            RemoteError: There is no such page, or the pattern names more than one folder.
        """
        folder, _, pattern = (url if "*" in url or "[" in url else url.rstrip("/") + "/*.parquet").rpartition("/")
        if "*" in folder:
            raise RemoteError(
                f"{shown(url)} names several folders, and a web server lists one at a time",
                "give a pattern of the files' names alone, or a list of URLs",
            )
        links: list[str] = self.tried(url, lambda: self.called("ls", f"{folder}/", detail=False, seconds=60))
        return sorted(link for link in links if fnmatch.fnmatchcase(link.partition("?")[0].rpartition("/")[2], pattern))

    def _ask(self, url: str, span: str, most: int) -> tuple[int, Any, bytes]:
        """Request a range once; return status, headers and, for a range, the body.

        Raises:
            PassingError: There was no response, or an error that may pass.
            RemoteError: The server's error will not pass.
        """
        import aiohttp
        from fsspec.asyn import sync

        try:
            system = self.system()
            status, headers, body, reason = sync(system.loop, self._answer, system, url, span, most)
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise RemoteError(f"{shown(url)} is no URL that can be read: {error}", "check it") from None
        except aiohttp.TooManyRedirects:
            raise RemoteError(f"{shown(url)} cannot be read: it leads in a circle", "check the URL") from None
        except aiohttp.ClientConnectorError as error:
            raise PassingError(f"no connection ({error})", unknown=True) from error
        except TimeoutError as error:
            raise PassingError(f"the server was silent for {self.remote.timeout:g} s, or too slow") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PassingError(f"the answer was cut short ({type(error).__name__}: {error})") from error
        if status in (404, 410):
            raise missing_file(url)
        if status in (401, 403, 407):
            raise refused(url, f"the server answered {status} {reason}")
        if status in _PASSING or (status >= 500 and status != 501):
            raise PassingError(f"the server answered {status} {reason}", _seconds(headers.get("Retry-After", "")))
        if status >= 400 and status not in (400, 412, 416, 501):
            raise RemoteError(f"{shown(url)} cannot be read: the server answered {status} {reason}", "check the URL")
        return status, headers, body

    async def _answer(self, system: Any, url: str, span: str, most: int) -> tuple[int, Any, bytes, str]:
        """Send a request and, if it takes far longer than usual, a second one; return the first response.

        Without that, one silent connection would stall the pass until its timeout (hedged requests: Dean and Barroso,
        "The Tail at Scale").
        """
        self._requests += 1
        tasks = [asyncio.ensure_future(self._once(system, url, span, most))]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._patience())
            if not done and self._twice < _TWICE * self._requests:
                self._twice += 1
                tasks.append(asyncio.ensure_future(self._once(system, url, span, most)))
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if pending and all(task.exception() for task in done):
                done, _ = await asyncio.wait(pending)  # the first failed, but the other may succeed
            return min(done, key=lambda task: task.exception() is not None).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _patience(self) -> float | None:
        """Return the seconds after which a response is late; None until the usual time is known."""
        if len(self._took) < _KNOWN:
            return None
        return max(_LATE, 3 * sorted(self._took)[len(self._took) * 9 // 10])

    async def _once(self, system: Any, url: str, span: str, most: int) -> tuple[int, Any, bytes, str]:
        import aiohttp

        limit, started = self.remote.timeout, time.monotonic()
        session = await system.set_session()
        options = dict(system.kwargs)
        # No compression: ranges of a compressed response are not ranges of the file.
        headers = {**options.pop("headers", {}), "Range": f"bytes={span}", "Accept-Encoding": "identity"}
        options["timeout"] = aiohttp.ClientTimeout(total=limit + most / SLOWEST, sock_connect=limit, sock_read=limit)
        async with session.get(system.encode_url(url), headers=headers, **options) as answer:
            if answer.status == 206:
                body = await answer.read()
                self._took.append(time.monotonic() - started)
            else:  # don't read it: an error page, or the whole file of perhaps many gigabytes
                body = b""
                answer.close()
            return answer.status, answer.headers, body, answer.reason or ""


def _mark(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0  # Retry-After may also be a date, which no store sends
