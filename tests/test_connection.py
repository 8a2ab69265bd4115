"""What comes before a request's body is bounded in bytes and time; what is not HTTP gets our error."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from service import connection
from service.connection import Connection, _Coalescing


async def _hello(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    answer = b"hello" + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


def talk(pieces: Iterable[bytes], *, rest: float = 0) -> bytes:
    """Send pieces to a server of one small app, then read until it closes the connection."""

    async def run() -> bytes:
        server = uvicorn.Server(uvicorn.Config(_hello, http=Connection, lifespan="off", log_config=None, ws="none", loop="asyncio"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(rest)
            except ConnectionError:
                pass  # closed while we still sent: what it said before is what counts
            try:
                answer = await asyncio.wait_for(reader.read(), 20)
            except ConnectionError:
                answer = b"reset"
            writer.close()
            server.should_exit = True
            await serving
            return answer

    return asyncio.run(run())


def test_a_usual_request_is_answered_and_the_connection_kept_until_told() -> None:
    get = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 60_000 + b"\r\n\r\n"
    answer = talk([get, get.replace(b"Host", b"Connection: close\r\nHost")], rest=0.05)
    assert answer.count(b"hello") == 2


@pytest.mark.parametrize(
    "flood",
    [b"X-A: " + b"a" * 100_000, b"X-A: b\r\n" * 20_000, b"X-A: b\r\n" * 20_000 + b"\r\n"],
    ids=["one header", "many headers", "many headers that end"],
)
def test_an_endless_head_is_refused(flood: bytes) -> None:
    start = b"GET / HTTP/1.1\r\nHost: x\r\n"
    answer = talk([start, *(flood[at : at + 8192] for at in range(0, len(flood), 8192))])
    assert answer.startswith(b"HTTP/1.1 400") or answer == b"reset"
    assert b"hello" not in answer


def test_endless_trailers_are_refused() -> None:
    start = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    answer = talk([start, *[b"X-A: b\r\n" * 1000] * 20])
    assert answer.startswith(b"HTTP/1.1 400") or answer == b"reset"
    assert b"hello" not in answer


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_closes_the_connection(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    begun = time.monotonic()
    assert talk([first]) == b""
    assert time.monotonic() - begun < 10


def test_a_slow_answer_is_not_taken_for_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    whole = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    assert b"hello" in talk([whole, b"a", b"b"], rest=0.3)


def test_what_is_not_http_gets_our_error_body() -> None:
    answer = talk([b"\x16\x03\x01 this is no HTTP\r\n\r\n"])
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error["code"] == "bad_request"
    assert b"x-request-id: " + error["request_id"].encode() in head


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("cut", [1000, 30], ids=["at once", "in pieces"])
def test_an_offer_of_another_protocol_is_passed_over(offer: bytes, cut: int) -> None:
    request = (
        b"POST /x HTTP/1.1\r\nHost: x\r\nUpgrade: %s\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        b"Content-Length: 9\r\n\r\n the body" % offer
    )
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = talk([*(request[at : at + cut] for at in range(0, len(request), cut)), last], rest=0.01)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"hello the body" in answer


def test_connect_is_refused() -> None:
    assert talk([b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n"]).startswith(b"HTTP/1.1 400")


def test_thousands_of_offers_at_once_are_all_passed_over() -> None:
    offer = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert talk([offer * 2500 + last]).count(b"hello") == 2501


def test_writes_of_one_turn_go_out_as_one_and_none_is_lost_or_late() -> None:
    class Wire(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[bytes] = []

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.sent.append(bytes(data))

        def close(self) -> None:
            self.sent.append(b"closed")

        def is_closing(self) -> bool:
            return b"closed" in self.sent

    async def main() -> None:
        wire = Wire()
        transport = _Coalescing(wire, asyncio.get_running_loop())
        transport.write(b"head ")
        transport.write(b"body")
        assert not transport.is_closing()
        assert wire.sent == []
        await asyncio.sleep(0)
        assert wire.sent == [b"head body"]
        transport.write(b"last")
        transport.close()
        assert transport.is_closing()
        await asyncio.sleep(0)
        assert wire.sent == [b"head body", b"last", b"closed"]

    asyncio.run(main())
