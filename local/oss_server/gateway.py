"""One request from its first byte to its last: who, what, the fault it meets, the answer."""

import base64
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from local.oss_server import xml
from local.oss_server.auth import Authenticator
from local.oss_server.blobs import BlobWriter, Written
from local.oss_server.context import Context, Reply, Settings, Stream
from local.oss_server.errors import OssError
from local.oss_server.faults import FaultBoard
from local.oss_server.multipart import Uploads
from local.oss_server.operations import Body, Operation, resolve
from local.oss_server.request import OssRequest, parse_request
from local.oss_server.stats import Stats
from local.oss_server.storage import Storage
from local.oss_server.wire import ConnectionCut, Wire

logger = logging.getLogger(__name__)

_WRITE_CHUNK = 1 << 20  # bytes gathered before a thread writes them
_MAX_SMALL_BODY = 4 << 20  # bytes
_NO_BODY = (204, 304)


@dataclass
class _Exchange:
    """What is known of a request while it is answered."""

    wire: Wire
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:24].upper())
    started: float = field(default_factory=time.monotonic)
    method: str = ""
    host: str = ""
    operation: str = "unknown"
    error: str = ""
    counted: bool = False


class Gateway:
    """The ASGI application behind every path but the server's own.

    Args:
        storage: buckets and objects.
        authenticator: checks signatures.
        settings: what the server was started with.
        faults: faults in force.
        stats: counts every request.
        clock: Unix seconds.
    """

    def __init__(
        self,
        storage: Storage,
        authenticator: Authenticator,
        settings: Settings,
        faults: FaultBoard,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._storage = storage
        self._uploads = Uploads(storage)
        self._authenticator = authenticator
        self._settings = settings
        self._faults = faults
        self._stats = stats
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = _Exchange(Wire(scope, receive, send))
        try:
            reply = await self._reply(scope, exchange)
            # Before the reply leaves, so that a client that has it finds itself counted.
            self._count(exchange)
            await _send(exchange, reply)
        except (ClientDisconnect, ConnectionCut) as gone:
            exchange.error = type(gone).__name__
            self._count(exchange)
        finally:
            self._stats.count_sent(exchange.wire.bytes_out)

    def _count(self, exchange: _Exchange) -> None:
        """Count the request, or, if that is done already, only how it ended."""
        operation = "" if exchange.counted else exchange.operation
        self._stats.count(operation, exchange.error, 0 if exchange.counted else exchange.wire.bytes_in)
        exchange.counted = True

    async def _reply(self, scope: Scope, exchange: _Exchange) -> Reply:
        exchange.method = scope["method"]
        try:
            request = parse_request(scope)
            exchange.host = request.host
            operation = resolve(request)
            exchange.operation = operation.name
            fault = self._faults.take(request, operation.name)
            if fault:
                exchange.wire.break_with(fault)
                if error := fault.error():
                    raise error
            return await self._perform(request, operation, exchange.wire.receive)
        except OssError as error:
            return _refusal(exchange, error)
        except (ClientDisconnect, ConnectionCut):
            raise
        except Exception:
            logger.exception("%s failed", exchange.operation)
            return _refusal(exchange, OssError("InternalError"))

    async def _perform(self, request: OssRequest, operation: Operation, receive: Receive) -> Reply:
        self._authenticator.check(request)
        context = Context(request, self._storage, self._uploads, self._settings, self._clock())
        if operation.body is Body.READ:
            context.content = await _read(receive)
            return await run_in_threadpool(operation.run, context)
        if not request.header("content-length") and not request.header("transfer-encoding"):
            raise OssError("MissingContentLength")
        await run_in_threadpool(self._storage.bucket, request.bucket)
        context.written = await _store(receive, await run_in_threadpool(self._storage.blobs.create))
        try:
            _check_md5(request, context.written)
            return await run_in_threadpool(operation.run, context)
        finally:
            if not context.kept:
                await run_in_threadpool(self._storage.blobs.drop, [context.written.segment])


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    async for piece in _pieces(receive):
        body += piece
        if len(body) > _MAX_SMALL_BODY:
            raise OssError("EntityTooLarge")
    return bytes(body)


async def _store(receive: Receive, writer: BlobWriter) -> Written:
    try:
        gathered = bytearray()
        async for piece in _pieces(receive):
            gathered += piece
            if len(gathered) >= _WRITE_CHUNK:
                await run_in_threadpool(writer.write, bytes(gathered))
                gathered.clear()
        await run_in_threadpool(writer.write, bytes(gathered))
        return await run_in_threadpool(writer.finish)
    except BaseException:
        writer.discard()
        raise


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


def _check_md5(request: OssRequest, written: Written) -> None:
    claimed = request.header("content-md5")
    if claimed and claimed != base64.b64encode(written.md5).decode():
        raise OssError("InvalidDigest", details={"Content-MD5": claimed})


def _refusal(exchange: _Exchange, error: OssError) -> Reply:
    """Return the error as OSS answers it; a HEAD carries the document in a header."""
    exchange.error = error.code
    if error.status in _NO_BODY:
        return Reply(error.status, error.headers)
    document = xml.error_document(error, exchange.request_id, exchange.host)
    headers = {**error.headers, "Content-Type": "application/xml"}
    if exchange.method == "HEAD":
        headers["x-oss-err"] = base64.b64encode(document).decode()
        return Reply(error.status, headers)
    return Reply(error.status, headers, document)


async def _send(exchange: _Exchange, reply: Reply) -> None:
    headers = {
        "Server": "AliyunOSS",
        "x-oss-request-id": exchange.request_id,
        "x-oss-server-time": str(int((time.monotonic() - exchange.started) * 1000)),
        **reply.headers,
    }
    body = reply.body
    if reply.status not in _NO_BODY:
        headers.setdefault("Content-Length", str(body.length if isinstance(body, Stream) else len(body)))
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    try:
        await exchange.wire.send({"type": "http.response.start", "status": reply.status, "headers": raw})
        if isinstance(body, Stream):
            await _send_stream(exchange.wire, body)
        else:
            await exchange.wire.send({"type": "http.response.body", "body": body, "more_body": False})
    finally:
        if isinstance(body, Stream):
            body.close()


async def _send_stream(wire: Wire, stream: Stream) -> None:
    """Send chunks as they are read, the last marked as such."""
    left = stream.length
    while left > 0 and not wire.closed:
        chunk = await run_in_threadpool(next, stream.chunks)
        left -= len(chunk)
        await wire.send({"type": "http.response.body", "body": chunk, "more_body": left > 0})
    if stream.length == 0:
        await wire.send({"type": "http.response.body", "body": b"", "more_body": False})
