"""The two ends of an ASGI connection, and what faults do to them."""

import asyncio
import socket
import struct
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from local.oss_server.faults import Direction, Fault, Kind

# Where the server's protocol class leaves the connection's transport in the ASGI scope's extensions.
TRANSPORT_EXTENSION = "oss_server.transport"
_SLICES_PER_SECOND = 10


class ConnectionCut(Exception):
    """The connection was reset on purpose; there is nobody left to answer."""


class Wire:
    """One request's connection: receive, send, and cutting it off.

    Args:
        scope: the ASGI scope.
        receive: ASGI's receive.
        send: ASGI's send.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions: MutableMapping[str, Any] = scope.get("extensions") or {}
        self._transport: asyncio.Transport | None = extensions.get(TRANSPORT_EXTENSION)
        self._method: str = scope["method"]
        self.receive = receive
        self.send = send
        self.bytes_in = 0
        self.bytes_out = 0
        self.receive, self.send = self._counting(receive, send)

    @property
    def closed(self) -> bool:
        """Whether the client is gone."""
        return self._transport is not None and self._transport.is_closing()

    def _counting(self, receive: Receive, send: Send) -> tuple[Receive, Send]:
        async def counted_receive() -> Message:
            message = await receive()
            self.bytes_in += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            self.bytes_out += len(message.get("body", b""))
            await send(message)

        return counted_receive, counted_send

    async def cut(self) -> None:
        """Let what was sent leave, then reset the connection (TCP RST).

        Raises:
            ConnectionCut: always.
        """
        transport = self._transport
        if transport is not None:
            while transport.get_write_buffer_size() and not transport.is_closing():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.02)  # the client's kernel takes what is under way
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
            await asyncio.sleep(0.01)  # the server learns of it before the request ends
        raise ConnectionCut

    def break_with(self, fault: Fault) -> None:
        """Make the connection behave as the fault says; kinds that answer an error change nothing here."""
        if fault.kind is Kind.RESET:
            if fault.cut_direction(self._method) is Direction.RECEIVED:
                self._cut_receiving(fault.after_bytes)
            else:
                self._cut_sending(fault.after_bytes)
        elif fault.kind is Kind.SLOW:
            self._slow_down(fault.bytes_per_second)
        elif fault.kind is Kind.LOST_REPLY:
            self._lose_reply()
        elif fault.kind is Kind.WRONG_CRC:
            self._lie_about_crc()

    def _cut_receiving(self, after: int) -> None:
        receive, got = self.receive, 0

        async def cutting() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got >= after or not message.get("more_body", False):
                await self.cut()
            return message

        self.receive = cutting

    def _cut_sending(self, after: int) -> None:
        send, sent = self.send, 0
        start: Message | None = None

        async def cutting(message: Message) -> None:
            nonlocal sent, start
            if message["type"] == "http.response.start":
                start = message  # held back: an empty reply is cut before it begins
                return
            body, more = message.get("body", b""), message.get("more_body", False)
            piece = body[: max(0, min(after - sent, len(body) if more else len(body) - 1))]
            if start is not None and body:
                await send(start)
                start = None
            sent += len(piece)
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if sent >= after or not more:
                await self.cut()

        self.send = cutting

    def _slow_down(self, rate: int) -> None:
        receive, send = self.receive, self.send
        piece = max(1, rate // _SLICES_PER_SECOND)

        async def slow_receive() -> Message:
            message = await receive()
            await asyncio.sleep(len(message.get("body", b"")) / rate)
            return message

        async def slow_send(message: Message) -> None:
            body: bytes = message.get("body", b"")
            while len(body) > piece and not self.closed:
                await send({**message, "body": body[:piece], "more_body": True})
                await asyncio.sleep(piece / rate)
                body = body[piece:]
            await asyncio.sleep(len(body) / rate)
            await send({**message, "body": body} if "body" in message else message)

        self.receive, self.send = slow_receive, slow_send

    def _lose_reply(self) -> None:
        async def losing(_message: Message) -> None:
            await self.cut()

        self.send = losing

    def _lie_about_crc(self) -> None:
        send = self.send

        async def lying(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, str(int(value) ^ 1).encode() if name == b"x-oss-hash-crc64ecma" else value)
                    for name, value in message["headers"]
                ]
            await send(message)

        self.send = lying
