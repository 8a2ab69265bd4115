"""One HTTP connection: uvicorn's, with limits on what comes before a body, our error form for bytes that are not HTTP, and
answers that reach clients who still send."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.schemas import error_body

HEAD_BYTES = 65_536  # request line and headers, trailers and what stands between chunks included
HEAD_S = 30.0  # from the first byte that could come to the last of the headers
LINGER_S, LINGER_SILENT_S, LINGER_BYTES = 30.0, 5.0, 4_000_000_000  # most that a request may still take after its answer
LINGER_STOPPING_S = 1.0  # instead of LINGER_S, when the server stops


class _Coalescing:
    """A transport whose writes of one turn of the event loop go out as one: an answer's head and body would wake the client twice."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, lingers: Callable[[], bool]) -> None:
        """While `lingers()`, closing closes only our direction, and `hang_up` is for the owner to call."""
        self._transport, self._loop, self._lingers = transport, loop, lingers
        self._pending: list[bytes] = []
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._closed:
            return
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        if not self._lingers():
            self.hang_up()
        elif not self.is_closing():
            self._closed = True
            self._flush()
            if self._transport.can_write_eof():  # TLS can't
                with suppress(OSError):  # reset by the client: the loop hears of it too
                    self._transport.write_eof()

    def hang_up(self) -> None:
        self._closed = True
        self._flush()
        self._transport.close()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _flush(self) -> None:
        if self._pending:
            self._transport.write(b"".join(self._pending))
            self._pending.clear()


class Connection(HttpToolsProtocol):
    """A head that is too long or too slow would hold memory and a place for ever: uvicorn limits neither.

    uvicorn also closes with the last byte of an answer. A kernel whose reader has gone resets the connection when more of the
    request comes, and what the client has not read by then is lost: so a connection lingers, reading on and throwing away.
    """

    _head: int | None = None  # bytes received of the head that is under way, or since the last of a chunked body
    _fields = 0  # bytes of all header fields of this request
    _body_begun = False
    _timer: asyncio.TimerHandle | None = None  # of the head, or of lingering
    _deaf = False  # what still comes can't be parsed
    _stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        self._unanswered: deque[asyncio.Future[None]] = deque()  # of pipelined requests there may be several
        self._wire = _Coalescing(transport, self.loop, self._lingers)
        super().connection_made(self._wire)  # type: ignore[arg-type]  # it does all that one does
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._forsake()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._stopping = True
        if self._answered_early():
            self._wire.hang_up()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._answered_early():
            self._late_bytes += len(data)
            self._read_on()
            if self._deaf:
                return
        if self._head is not None:
            self._head += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._head is not None and self._head > HEAD_BYTES:
            self.send_400_response(f"The request line and headers are over {HEAD_BYTES} bytes.")

    def _feed(self, data: bytes) -> bytes:
        """Parse `data`; what must be parsed next, if anything: the parser stops at a request that offers another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._declined() + data[offer.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        if self.transport.is_closing():
            raise ValueError  # the parser stops: nobody would answer
        self._unset_keepalive_if_required()
        super().on_message_begin()
        gone = self.scope["state"]["gone"] = self.loop.create_future()  # done when the client has gone before its answer
        self._unanswered.append(gone)
        self._fields, self._body_begun = 0, False
        if self._head is None:
            self._begin()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._answered_early() and not self._deaf:
            self._linger()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value)
        if self._fields > HEAD_BYTES:
            raise ValueError  # the parser stops, and data_received answers
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end()
        self._head = 0  # a chunk's size follows, if it is no body
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_begun, self._head = True, None
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._head = 0  # and trailers here

    def on_chunk_complete(self) -> None:
        self._head = 0

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        late = self._answered_early()
        super().on_message_complete()
        self.cycle.more_body = False
        self._end()
        if late:
            if self.transport.is_closing():
                self._wire.hang_up()
            else:
                self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        elif not self.pipeline:
            self.flow.resume_reading()  # uvicorn stays paused after a large last chunk, and would not see the client leave

    def _answered_early(self) -> bool:
        """Whether more may come of a request that has its answer."""
        return self._deaf or (self.cycle is not None and self.cycle.response_complete and self.cycle.more_body)

    def _lingers(self) -> bool:
        # A client that waits for permission to send will send nothing: closing at once is the kindest.
        return self._deaf or (self._answered_early() and (self._body_begun or not self.expect_100_continue))

    def _linger(self) -> None:
        self._late_bytes, self._linger_end = 0, self.loop.time() + (LINGER_STOPPING_S if self._stopping else LINGER_S)
        if self.cycle is not None:
            self.cycle.body.clear()
        self._read_on()

    def _read_on(self) -> None:
        self.flow.pause_reading()  # one read in each turn of the event loop: a fast client's would come by the dozen
        self.loop.call_soon(self.flow.resume_reading)
        left_s = self._linger_end - self.loop.time() if self._late_bytes < LINGER_BYTES else 0
        self._set_timer(max(0, min(LINGER_SILENT_S, left_s)), self._wire.hang_up)

    def _forsake(self) -> None:
        """No request of this connection gets an answer any more."""
        for gone in self._unanswered:
            if not gone.done():
                gone.set_result(None)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

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
        self._set_timer(HEAD_S, self.transport.close)

    def _end(self) -> None:
        self._head = None
        self._set_timer(0, None)

    def _set_timer(self, seconds: float, then: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, then) if then else None

    def send_400_response(self, msg: str) -> None:
        if self._answered_early():  # and what is wrong belongs to that request
            self._deaf = True
            self.transport.close()
        elif not self.transport.is_closing():
            request_id = uuid.uuid4().hex
            body = error_body("bad_request", f"{msg} Speak HTTP/1.1.", request_id).model_dump_json().encode()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}x-request-id: {request_id}\r\nconnection: close\r\n\r\n".encode() + body)
            self._deaf = True
            self.transport.close()
            self._forsake()
            self._linger()
