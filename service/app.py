"""The ASGI app: all routes and their documentation, the shortest way to the busiest of them, CORS, error handling."""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from models.checkpoint import Header
from service import envelope, openapi, protocols, routes
from service.settings import Settings

_EXPOSED = ("x-request-id", "retry-after", protocols.HEADER_LENGTH)  # to scripts of the allowed pages


def assemble(app: FastAPI, settings: Settings, header: Header) -> ASGIApp:
    """Put the routes onto `app`, and around it what every request passes."""
    app.router.routes.extend([*routes.router.routes, *protocols.router.routes])  # flat: a 405 names all that a path allows
    setattr(app, "openapi", cache(lambda: openapi.document(app, header, keyed=bool(settings.keys))))  # noqa: B010  # FastAPI's own way to replace it
    whole: ASGIApp = envelope.Direct(app, {("POST", "/predict"): routes.predict})
    if settings.origins:
        whole = CORSMiddleware(whole, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_EXPOSED)
    return envelope.Envelope(whole)
