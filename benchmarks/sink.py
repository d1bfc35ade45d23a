"""A bucket that costs next to nothing, so that a client's own speed shows: no signatures, only size and CRC64 kept.

``python -m benchmarks.sink FOLDER`` prints its address. What lies in FOLDER can be fetched by its name.
"""

from __future__ import annotations

import os
import re
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from trainer.store import crc64

BLOCK = 1 << 20
_NO_UPLOADS = (
    "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated><NextKeyMarker/><NextUploadIdMarker/>"
    "</ListMultipartUploadsResult>"
)
_NO_PARTS = "<ListPartsResult><IsTruncated>false</IsTruncated><NextPartNumberMarker/></ListPartsResult>"


class State:
    """Objects and parts: size and CRC64 of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, tuple[int, int]] = {}
        self.parts: dict[str, dict[int, tuple[int, int]]] = {}
        self.lock = threading.Lock()
        for path in folder.iterdir():
            self.objects[path.name] = (path.stat().st_size, crc64.of_file(str(path)))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    state: State

    def _read(self) -> tuple[int, int]:
        left, crc = int(self.headers.get("Content-Length") or 0), 0
        size, buffer = left, memoryview(bytearray(min(BLOCK, max(left, 1))))
        while left:
            count = self.rfile.readinto(buffer[: min(len(buffer), left)])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError
            crc, left = crc64.update(crc, buffer[:count]), left - count
        return size, crc

    def _answer(self, status: int, body: str = "", crc: int | None = None, size: int | None = None) -> None:
        data = body.encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(data) if size is None else size))
        self.send_header("x-oss-request-id", "0")
        if crc is not None:
            self.send_header("x-oss-hash-crc64ecma", str(crc))
            self.send_header("ETag", f'"{crc:X}"')
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def _where(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        return unquote(url.path).rpartition("/")[2], query

    def do_PUT(self) -> None:
        """An object, a part, or a copy."""
        name, query = self._where()
        source = self.headers.get("x-oss-copy-source")
        got = self.state.objects[unquote(source).rpartition("/")[2]] if source else self._read()
        with self.state.lock:
            if "partNumber" in query:
                self.state.parts[query["uploadId"]][int(query["partNumber"])] = got
            else:
                self.state.objects[name] = got
        self._answer(200, crc=got[1])

    def do_POST(self) -> None:
        """The beginning and the end of a multipart upload."""
        name, query = self._where()
        self._read()
        if "uploads" in query:
            with self.state.lock:
                upload_id = f"U{len(self.state.parts)}"
                self.state.parts[upload_id] = {}
            root = "InitiateMultipartUploadResult"
            self._answer(200, f"<{root}><Key>{name}</Key><UploadId>{upload_id}</UploadId></{root}>")
            return
        size = crc = 0
        for _, (length, part) in sorted(self.state.parts[query["uploadId"]].items()):
            size, crc = size + length, crc64.combine(crc, part, length)
        with self.state.lock:
            self.state.objects[name] = (size, crc)
        root = "CompleteMultipartUploadResult"
        self._answer(200, f"<{root}><Key>{name}</Key><ETag>&quot;{crc:X}&quot;</ETag></{root}>", crc)

    def do_HEAD(self) -> None:
        """Size and CRC64."""
        size, crc = self.state.objects.get(self._where()[0], (-1, 0))
        if size < 0:
            self._answer(404, size=0)
        else:
            self._answer(200, crc=crc, size=size)

    def do_GET(self) -> None:
        """A file or a range of it; a list of no uploads."""
        name, query = self._where()
        if "uploads" in query:
            self._answer(200, _NO_UPLOADS)
            return
        if "uploadId" in query:
            self._answer(200, _NO_PARTS)
            return
        path = self.state.folder / name
        if not name or not path.is_file():
            self._answer(404, "<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
            return
        size, crc = self.state.objects[name]
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first, last = (int(span[1]), min(int(span[2] or size - 1), size - 1)) if span else (0, size - 1)
        self.send_response_only(206 if span else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("x-oss-hash-crc64ecma", str(crc))
        self.send_header("ETag", f'"{crc:X}"')
        self.end_headers()
        self.wfile.flush()
        with path.open("rb") as stream:
            while first <= last:
                first += os.sendfile(self.connection.fileno(), stream.fileno(), first, last - first + 1)


class Server(socketserver.ThreadingTCPServer):
    """A thread per connection."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Serve until killed."""
    Handler.state = State(Path(sys.argv[1]))
    with Server(("127.0.0.1", 0), Handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
