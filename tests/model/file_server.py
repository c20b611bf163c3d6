"""A small HTTP server on this machine whose faults a test can choose."""

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What the server holds and how it misbehaves; ``requests`` is what it was asked, as (method, path, Range)."""

    files: dict[str, bytes] = field(default_factory=dict)
    etag: str | None = None  # None: made of the bytes; "": none is sent
    cuts: list[int] = field(default_factory=list)  # bytes after which each of the next answers breaks off
    resets: bool = False  # a cut resets the connection
    statuses: list[int] = field(default_factory=list)  # of the next answers, in place of the file
    ranges: bool = True
    length: int | None = None  # a wrong Content-Length
    chunked: bool = False  # answers of the whole file name no length
    headers: dict[str, str] = field(default_factory=dict)  # "" takes a header away
    address: str = ""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"{self.address}/{path}"


@contextmanager
def serve() -> Iterator[Site]:
    """The site, served from 127.0.0.1 until the block ends."""
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    site.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, send_body: bool) -> None:
        site, path = self.site, self.path.lstrip("/").partition("?")[0]
        site.requests.append((self.command, path, self.headers.get("Range")))
        if site.statuses:
            self._plain(site.statuses.pop(0))
        elif path not in site.files:
            self._plain(404)
        else:
            self._file(site.files[path], send_body)

    def _file(self, body: bytes, send_body: bool) -> None:
        site = self.site
        etag = f'"{hashlib.md5(body).hexdigest()}"' if site.etag is None else site.etag
        start = self._start(body, etag, self.headers)
        if start is not None and start >= len(body):
            self._plain(416, {"Content-Range": f"bytes */{len(body)}"})
            return
        headers = {
            "Content-Length": str(site.length or len(body) - (start or 0)),
            "ETag": etag,
            "Accept-Ranges": "bytes",
        }
        if start is not None:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        chunked = site.chunked and start is None
        if chunked:
            headers |= {"Content-Length": "", "Transfer-Encoding": "chunked"}
        self._head(200 if start is None else 206, headers | site.headers)
        if send_body:
            with suppress(ConnectionError):  # the client has seen enough
                self._send(body[start or 0 :], chunked)

    def _send(self, rest: bytes, chunked: bool) -> None:
        """All of ``rest``, in one chunk where ``chunked``, or the next cut of it."""
        if chunked:
            self.wfile.write(f"{len(rest):x}\r\n".encode())
        if self.site.cuts:
            self.wfile.write(rest[: self.site.cuts.pop(0)])
            if self.site.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.rfile.close()
                self.connection.close()
        else:
            self.wfile.write(rest + b"\r\n0\r\n\r\n" if chunked else rest)

    def _start(self, body: bytes, etag: str, asked: Message) -> int | None:
        """The first byte of a range that is to be answered as one."""
        wanted = asked.get("Range", "")
        if not (self.site.ranges and wanted.startswith("bytes=")) or asked.get("If-Range", etag) != etag:
            return None
        return int(wanted.removeprefix("bytes=").partition("-")[0])

    def _plain(self, status: int, headers: dict[str, str] | None = None) -> None:
        self._head(status, {"Content-Length": "0"} | (headers or {}))

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass
