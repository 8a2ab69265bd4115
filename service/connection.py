"""One HTTP connection: uvicorn's, with limits on what comes before a body, and our error form for bytes that are not HTTP."""

from __future__ import annotations

import asyncio
import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.schemas import ErrorBody, ErrorDetail

HEAD_BYTES = 65_536  # request line and headers, trailers included
HEAD_S = 30.0  # from the first byte that could come to the last of the headers


class Connection(HttpToolsProtocol):
    """A head that is too long or too slow would hold memory and a place for ever: uvicorn limits neither."""

    _head: int | None = None  # bytes received of the head that is under way
    _fields = 0  # bytes of all header fields of this request
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers are over {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._fields = 0
        if self._head is None:
            self._begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value)
        if self._fields > HEAD_BYTES:
            raise ValueError  # the parser stops, and uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()

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
        detail = ErrorDetail(code="bad_request", message=f"{msg} Speak HTTP/1.1.", request_id=request_id)
        body = ErrorBody(error=detail).model_dump_json().encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}x-request-id: {request_id}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
