"""What comes before a request's body is bounded in bytes and time; what is not HTTP gets our error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

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


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without having read anything."""
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


Loop = Callable[[], asyncio.AbstractEventLoop]


@asynccontextmanager
async def serving(app: ASGIApp, **options: Any) -> AsyncIterator[tuple[str, int]]:
    """A server of one small app, and where it listens."""
    server = uvicorn.Server(
        uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=2, **options)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


def talk(pieces: Iterable[bytes], *, rest: float = 0, app: ASGIApp = _hello, loop: Loop = asyncio.new_event_loop, **options: Any) -> bytes:
    """Send pieces to a server of one small app, then read until it closes the connection."""

    async def run() -> bytes:
        async with serving(app, **options) as address:
            trust = ssl._create_unverified_context()
            reader, writer = await asyncio.open_connection(*address, ssl=trust if "ssl_certfile" in options else None)
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
            return answer

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(run())


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
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"hello" not in answer


@pytest.mark.parametrize(
    "pieces",
    [
        [b"0\r\n", *[b"X-A: b\r\n" * 1000] * 20],
        [b"0\r\nX-A: ", *[b"a" * 8192] * 40],
        [b"1;a=", *[b"a" * 8192] * 40],
        [b"1\r\na\r\n1;a=", *[b"a" * 8192] * 40],
    ],
    ids=["many trailers", "one trailer", "a chunk's extension", "another chunk's extension"],
)
@pytest.mark.parametrize("app", [_hello, _refuse], ids=["before the answer", "after the answer"])
def test_endless_lines_around_chunks_are_refused(app: ASGIApp, pieces: list[bytes]) -> None:
    answer = talk([b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", *pieces], app=app)
    assert answer.startswith(b"HTTP/1.1 403" if app is _refuse else b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1 + (app is _hello)  # "Speak HTTP/1.1."
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
    begun = time.monotonic()
    answer = talk([b"\x16\x03\x01 this is no HTTP\r\n\r\n"])
    assert time.monotonic() - begun < 2
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


def body(size: int, *, chunked: bool, head: bytes = b"") -> list[bytes]:
    """A POST of zero bytes, in pieces."""
    size_line = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    blocks = [b"\0" * min(100_000, size - at) for at in range(0, size, 100_000)]
    if chunked:
        blocks = [*(b"%x\r\n%s\r\n" % (len(block), block) for block in blocks), b"0\r\n\r\n"]
    return [b"POST / HTTP/1.1\r\nHost: x\r\n%s%s\r\n\r\n" % (head, size_line), *blocks]


LAST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "chunked"])
@pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
def test_who_sends_all_before_reading_gets_the_answer_and_may_go_on(head: bytes, chunked: bool, loop: Loop) -> None:
    answer = talk([*body(30_000_000, chunked=chunked, head=head), *([] if head else [LAST])], app=_refuse, loop=loop)
    assert answer.count(b"HTTP/1.1 403") == (1 if head else 2)
    assert answer.endswith(b"no")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
def test_over_tls_too(head: bytes, loop: Loop, tmp_path: Path) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x -keyout key.pem -out cert.pem"
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    files: dict[str, Any] = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    answer = talk([*body(10_000_000, chunked=True, head=head), *([] if head else [LAST])], app=_refuse, loop=loop, **files)
    assert answer.count(b"HTTP/1.1 403") == (1 if head else 2)
    assert answer.endswith(b"no")


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in the same bytes"])
@pytest.mark.parametrize(("answers", "asked"), [(b"keep-alive", ["POST", "GET"]), (b"close", ["POST"])])
def test_what_comes_behind_a_late_body_is_a_request_of_its_own_unless_that_was_the_last(
    answers: bytes, asked: list[str], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_SILENT_S", 0.2)
    begun = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["method"])
        await asyncio.sleep(0.4 if scope["method"] == "GET" else 0)  # no silence that would end the connection
        await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", answers)]})
        await send({"type": "http.response.body"})

    first, late = body(10, chunked=False)
    answer = talk([first, late, LAST] if apart else [first, late + LAST], rest=0.05, app=app)
    assert begun == asked
    assert answer.count(b"HTTP/1.1 204") == len(asked)


def test_a_connection_that_idles_after_a_late_body_is_closed_as_any_other() -> None:
    assert talk(body(10, chunked=False), rest=0.05, app=_refuse, timeout_keep_alive=1).endswith(b"no")


def test_a_late_body_that_is_malformed_gets_no_second_answer() -> None:
    head, *_ = body(10, chunked=True)
    answer = talk([head, b"no size\r\n", b"a" * 1_000_000, LAST], rest=0.05, app=_refuse)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"no")


@pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
@pytest.mark.parametrize(
    ("limit", "value", "pieces"),
    [("LINGER_S", 0.3, [b"a"] * 40), ("LINGER_SILENT_S", 0.3, []), ("LINGER_BYTES", 1_000_000, [bytes(100_000)] * 400)],
    ids=["a byte now and then", "nothing more", "too much"],
)
def test_a_late_body_is_not_awaited_for_ever(
    head: bytes, limit: str, value: float, pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, limit, value)

    async def run() -> float:
        async with serving(_refuse) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(body(99_000_000, chunked=False, head=head)[0])
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 403")
            begun = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02 if len(piece) == 1 else 0)
                # A half-closed connection reads as ended, so another byte tells.
                while time.monotonic() < begun + 4:
                    await asyncio.sleep(0.05)
                    if not pieces and time.monotonic() < begun + 0.6:
                        continue
                    writer.write(b"a")
                    await writer.drain()
            writer.close()
            return time.monotonic() - begun

    assert 0 < asyncio.run(run()) < 3


@pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
def test_a_stop_does_not_wait_for_late_bodies(head: bytes) -> None:
    async def run() -> float:
        async with serving(_refuse) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(body(99_000_000, chunked=False, head=head)[0])
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 403")
            begun = time.monotonic()
        writer.close()
        return time.monotonic() - begun

    assert asyncio.run(run()) < 1


def test_a_malformed_body_ends_the_request_that_waits_for_it_at_once() -> None:
    ended = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async def run() -> None:
        async with serving(wait) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(body(10, chunked=True)[0] + b"no size\r\n")
            await asyncio.wait_for(ended.wait(), 2)
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()

    asyncio.run(run())


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
        transport = _Coalescing(wire, asyncio.get_running_loop(), lambda: False)
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
