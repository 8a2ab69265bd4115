"""One HTTP connection: uvicorn's, with limits on what comes before a body, and our error form for bytes that are not HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.schemas import error_body

HEAD_BYTES = 65_536  # request line and headers, trailers included
HEAD_S = 30.0  # from the first byte that could come to the last of the headers


class _Coalescing:
    """A transport whose writes of one turn of the event loop go out as one: an answer's head and body would wake the client twice."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pending: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._pending:
            self._transport.write(b"".join(self._pending))
            self._pending.clear()


class Connection(HttpToolsProtocol):
    """A head that is too long or too slow would hold memory and a place for ever: uvicorn limits neither."""

    _head: int | None = None  # bytes received of the head that is under way
    _fields = 0  # bytes of all header fields of this request
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        self._unanswered: deque[asyncio.Future[None]] = deque()  # of pipelined requests there may be several
        super().connection_made(_Coalescing(transport, self.loop))  # type: ignore[arg-type]  # it does all that one does
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        for gone in self._unanswered:
            if not gone.done():
                gone.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._head is not None:
            self._head += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._head is not None and self._head > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers are over {HEAD_BYTES} bytes.")

    def _feed(self, data: bytes) -> bytes:
        """Parse `data`; what must be parsed next, if anything: the parser stops at a request that offers another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._declined() + data[offer.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        gone = self.scope["state"]["gone"] = self.loop.create_future()  # done when the client has gone before its answer
        self._unanswered.append(gone)
        self._fields = 0
        if self._head is None:
            self._begin()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value)
        if self._fields > HEAD_BYTES:
            raise ValueError  # the parser stops, and data_received answers
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            if not self.pipeline:
                self.flow.resume_reading()  # uvicorn stays paused after a large last chunk, and would not see the client leave

    def _declined(self) -> bytes:
        """The head of a request that offers another protocol (`curl --http2` and some HTTP libraries do), without the offer.

        The parser would drop the body of such a request, so a new one gets the head again. Raises HttpParserError for CONNECT.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("no proxy")
        fields = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection", b"http2-settings")]
        if not self.parser.should_keep_alive():
            fields.append((b"connection", b"close"))
        head = b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        return head + b"".join(b"%s: %s\r\n" % field for field in fields) + b"\r\n"

    def _begin(self) -> None:
        self._head = 0
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _end(self) -> None:
        self._head = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        request_id = uuid.uuid4().hex
        body = error_body("bad_request", f"{msg} Speak HTTP/1.1.", request_id).model_dump_json().encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}x-request-id: {request_id}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
