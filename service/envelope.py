"""Around every request: its id, its log line, its errors in one form."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.images import ImageError
from service.frontdoor import ClientGone
from service.schemas import ApiError, ProtocolError, error_body

log = logging.getLogger("service.access")

_PROBES = ("/livez", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready")

_RETRY_AFTER_S = 1


class Envelope:
    """Around every request: an id, one log line, errors in one form."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived = time.monotonic()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {}).update(arrived=arrived, request_id=request_id)
        status = 0
        waits = b"expect" in headers  # for permission to send its body

        async def receive_noting() -> Message:
            nonlocal waits
            waits = False
            return await receive()

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                if waits:  # after a refusal some send it, and some do not: what comes next could be either
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self.app(scope, receive_noting, send_noting)
        except ClientGone:
            status = 499
        except Exception:
            log.exception("unexpected error, request %s", request_id)
            if not status:
                await _internal(scope)(scope, receive, send_noting)
        finally:
            # Probes come every few seconds, each the same as the last.
            level = logging.DEBUG if status == 200 and scope["path"] in _PROBES else logging.INFO
            log.log(level, "%s %s %s %.1f ms %s", scope["method"], scope["path"], status, (time.monotonic() - arrived) * 1e3, request_id)


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if 0 < len(text) <= 128 and text.isascii() and text.isprintable() else os.urandom(16).hex()


def _error_response(scope: Scope, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """In the form that clients of this path read."""
    error, request_id = ApiError(code, message), scope["state"]["request_id"]
    body: BaseModel = error_body(code, message, request_id)
    if scope["path"] == "/v2" or scope["path"].startswith("/v2/"):
        body = ProtocolError(error=message, code=code, request_id=request_id)
    headers = dict(headers or {})
    if error.status == 503:
        headers["retry-after"] = str(_RETRY_AFTER_S)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body.model_dump(), error.status, headers)


def _internal(scope: Scope) -> Response:
    return _error_response(scope, "internal", "something went wrong here; the server's log says what")


def _answer_error(request: Request, error: Exception) -> Response:
    """The one place where exceptions become HTTP."""
    scope = request.scope
    if isinstance(error, (ApiError, ImageError)):
        return _error_response(scope, error.code, str(error))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return _error_response(scope, "bad_request", f"{first['loc'][-1]}: {first['msg']}, not {first.get('input')!r}")
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return _error_response(scope, "not_found", f"{path}: no such route; /docs lists them")
    if error.status_code == 405:
        routes = (route for route in request.app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE)
        allowed = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
        return _error_response(scope, "method_not_allowed", f"{path}: allowed is {allowed}", {"allow": allowed})
    return _error_response(scope, "bad_request", str(error.detail))


_ANSWERED = (ApiError, ImageError, RequestValidationError, HTTPException)
Endpoint = Callable[[Request], Awaitable[Response]]


class Direct:
    """The busiest endpoints by the shortest way: FastAPI's own takes as much of the CPU as all the rest that a request costs."""

    def __init__(self, app: FastAPI, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self.app, self.endpoints = app, endpoints
        for kind in _ANSWERED:
            app.add_exception_handler(kind, _answer_error)
        app.add_exception_handler(Exception, lambda request, error: _internal(request.scope))  # and it comes on to the envelope's log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        scope["app"] = self.app
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except _ANSWERED as error:
            response = _answer_error(request, error)
        await response(scope, receive, send)
