"""Around every request: errors that nobody expected, in the form of their path."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from service.envelope import Direct, Envelope


async def _broken(request: Request) -> Response:
    raise RuntimeError("a secret")


def ask(path: str) -> tuple[int, str]:
    """Status and body of a request to an app whose routes all fail."""
    app = FastAPI()
    for route in ("/direct", "/through", "/v2/through"):
        app.add_route(route, _broken)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"x-request-id", b"mine")], "query_string": b""}
    asyncio.run(Envelope(Direct(app, {("GET", "/direct"): _broken}))(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (b"x-request-id", b"mine") in sent[0]["headers"]
    return sent[0]["status"], sent[1]["body"].decode()


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("/direct", '{"error":{"code":"internal",'),
        ("/through", '{"error":{"code":"internal",'),
        ("/v2/through", '{"error":"something went wrong'),
    ],
)
def test_an_unexpected_error_is_logged_and_answered_in_the_form_of_its_path(
    path: str, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        status, body = ask(path)
    assert status == 500
    assert body.startswith(start)
    assert '"request_id":"mine"' in body
    assert "secret" not in body
    assert caplog.text.count("RuntimeError: a secret") == 1
    assert f"GET {path} 500 " in caplog.text
