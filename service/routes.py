"""The HTTP routes of our own API."""

from __future__ import annotations

import asyncio
import hmac
import time
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import Field, TypeAdapter, ValidationError
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from models.checkpoint import Header
from models.images import ImageError
from service import envelope
from service.bodies import image_bytes
from service.frontdoor import ClientGone, FrontDoor, Pixels
from service.schemas import (
    ApiError,
    ErrorBody,
    Health,
    Info,
    Model,
    ModelInfo,
    Prediction,
    PredictRequest,
    PredictResponse,
    Timing,
    WorkerInfo,
)
from service.settings import Settings
from service.slots import ProcessState

_FEW = 16  # labels that are found sooner one by one than by sorting a thousand


class Service:
    """What the routes need, one in each front-door process."""

    def __init__(self, settings: Settings, header: Header, front_door: FrontDoor) -> None:
        self.settings, self.header, self.front_door = settings, header, front_door
        self.model = Model(name=header.name, version=header.version)
        self.keys = [key.encode() for key in settings.keys]
        self.body_limit = int(settings.max_body_mb * 1e6)
        self.inflight_limit = max(self.body_limit, int(settings.max_inflight_mb * 1e6) // front_door.memory.layout.doors)
        self.inflight = 0  # bytes of request bodies in this process
        self.versions = {name: version(name) for name in ("spyglass", "litserve", "openvino", "torch", "torchvision", "pillow")}

    async def read_body(self, request: Request, deadline: float) -> bytes:
        """The whole body, never more than the limits. The caller takes its length off `inflight` when done with it."""
        too_large = ApiError("body_too_large", f"the body is over {self.settings.max_body_mb:g} MB; send a smaller image (max_body_mb)")
        declared = request.headers.get("content-length", "").lstrip("0")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self.body_limit):
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    self.inflight += len(chunk)
                    chunks.append(chunk)
                    if size > self.body_limit:
                        raise too_large
                    if self.inflight > self.inflight_limit:
                        raise ApiError("overloaded", "too many bytes of requests in flight (max_inflight_mb); try again later or slower")
                    if not message.get("more_body", False):
                        return b"".join(chunks) if len(chunks) > 1 else chunk
        except BaseException as error:
            self.inflight -= size
            if isinstance(error, TimeoutError):
                raise ApiError("deadline_exceeded", "the deadline passed before the whole body had arrived") from None
            raise

    def fill(self, body: bytes, content_type: str, pixels: Pixels) -> None:
        """Decode a request body into a slot. Runs in a decode thread."""
        max_pixels = int(self.settings.max_megapixels * 1e6)
        try:
            self.header.preprocessing.read(image_bytes(body, content_type), max_pixels=max_pixels, out=pixels)
        except ImageError as error:
            if error.code == "image_corrupt" and content_type.startswith("application/x-www-form-urlencoded"):
                # What `curl -d @file` sends, having dropped every line end.
                raise ImageError(error.code, f"{error} With curl, send a file by --data-binary, not by -d.") from error
            raise

    def deadline(self, request: Request, arrived: float) -> float:
        """When the answer must be out, in monotonic seconds: after timeout_s, or the client's shorter x-timeout-ms."""
        timeout = self.settings.timeout_s
        asked = request.headers.get("x-timeout-ms")
        if asked is not None:
            if not (asked.isascii() and asked.isdecimal() and len(asked) < 12 and int(asked) > 0):
                raise ApiError("bad_request", f"x-timeout-ms: {asked!r} must be a whole number of milliseconds from 1")
            timeout = min(timeout, int(asked) / 1000)
        return arrived + timeout

    def predictions(self, probabilities: np.ndarray[Any, np.dtype[np.float32]], top_k: int) -> list[Prediction]:
        """The `top_k` most probable labels, at most all; of equals the lower index first."""
        count = min(top_k, len(probabilities))
        if count <= _FEW:
            left, best = probabilities.copy(), []
            for _ in range(count):
                best.append(int(left.argmax()))
                left[best[-1]] = -1
        else:
            best = np.argsort(-probabilities, kind="stable")[:count].tolist()
        labels = self.header.labels
        return [Prediction(label=labels[index], index=index, probability=float(probabilities[index])) for index in best]


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _require_key(
    request: Request,
    # FastAPI reads them for the documentation.
    header: Annotated[str | None, Depends(APIKeyHeader(name="X-API-Key", auto_error=False))] = None,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))] = None,
) -> None:
    service: Service = request.app.state.service
    if not service.keys:
        return
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    given = (request.headers.get("x-api-key") or (credentials.strip() if scheme.lower() == "bearer" else "")).encode("latin-1")
    # Every key is compared, each in constant time: the answer's delay says nothing about them.
    if not any([hmac.compare_digest(given, key) for key in service.keys]):
        raise ApiError("unauthorized", "send a valid key as `X-API-Key: KEY` or `Authorization: Bearer KEY`")


_TOP_K = TypeAdapter(Annotated[int, Field(ge=1)])


def _top_k(request: Request, default: int) -> int:
    asked = request.query_params.get("top_k") if request.scope["query_string"] else None
    if asked is None:
        return default
    try:
        return _TOP_K.validate_python(asked)
    except ValidationError as error:
        raise ApiError("bad_request", f"top_k: {error.errors(include_url=False)[0]['msg']}, not {asked!r}") from None


API_VERSION = "1.0"

router = APIRouter()
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "malformed request: `bad_request`"),
        (401, "`unauthorized`"),
        (413, "`body_too_large`, `image_too_large`"),
        (415, "`not_an_image`, `unsupported_format`"),
        (422, "an image that does not decode to the end: `image_corrupt`"),
        (500, "`internal`"),
        (503, "`overloaded`, `draining`, `worker_failed`; with `Retry-After`"),
        (504, "`deadline_exceeded`"),
    )
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_PREDICT = {
    "parameters": [
        {
            "name": "top_k",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 1, "title": "Top K"},
            "description": "how many labels to answer; more than there are gives all",
        }
    ],
    "requestBody": {
        "required": True,
        "description": "one image: JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF",
        "content": {
            "multipart/form-data": {"schema": {"type": "object", "properties": {"image": {"type": "string", "format": "binary"}}}},
            "application/json": {"schema": PredictRequest.model_json_schema()},
            "image/*": _BINARY,
            "application/octet-stream": _BINARY,
        },
    },
}


@router.post(
    "/predict",
    response_model=PredictResponse,
    responses=_ERRORS,
    openapi_extra=_PREDICT,
    dependencies=[Depends(_require_key)],
    summary="Classify one image",
    tags=["classify"],
)
async def predict(request: Request) -> Response:
    """The body is the image file itself, one file of a multipart form under any name, or JSON `{"image": "<base64>"}`."""
    service: Service = request.app.state.service
    state = request.scope["state"]
    _require_key(request)
    top_k = _top_k(request, service.settings.top_k)
    arrived: float = state["arrived"]
    deadline = service.deadline(request, arrived)
    body = await service.read_body(request, deadline)
    try:
        fill = partial(service.fill, body, request.headers.get("content-type", ""))
        answer = await service.front_door.classify(fill, deadline, state["gone"])
    finally:
        service.inflight -= len(body)
    response = PredictResponse(
        model=service.model,
        predictions=service.predictions(answer.probabilities, top_k),
        request_id=state["request_id"],
        timing_ms=Timing(
            decode=round(answer.decode_s * 1e3, 3),
            queue=round(answer.queue_s * 1e3, 3),
            forward=round(answer.forward_s * 1e3, 3),
            total=round((time.monotonic() - arrived) * 1e3, 3),
        ),
    )
    return Response(response.model_dump_json() + "\n", media_type="application/json")  # the line end: for people at a terminal


@router.get("/", include_in_schema=False)
async def index() -> Response:
    return RedirectResponse("/docs")


@router.get("/livez", response_model=Health, summary="Whether the processes run", tags=["health"])
async def livez(service: Annotated[Service, Depends(_service)]) -> Health:
    if (service.front_door.memory.workers["state"] == ProcessState.DEAD).any():
        raise ApiError("worker_failed", "a worker process died")
    return Health(status="alive")


@router.get(
    "/readyz", response_model=Health, responses={503: _ERRORS[503]}, summary="Whether every device classifies images", tags=["health"]
)
@router.get("/health", response_model=Health, responses={503: _ERRORS[503]}, summary="The same as /readyz", tags=["health"])
async def readyz(service: Annotated[Service, Depends(_service)]) -> Health:
    problem = service.front_door.not_ready(service.settings.worker_timeout_s)
    if problem:
        raise ApiError(*problem)
    return Health(status="ready")


@router.get(
    "/info",
    response_model=Info,
    dependencies=[Depends(_require_key)],
    responses={401: _ERRORS[401]},
    summary="What is served, and how",
    tags=["health"],
)
async def info(service: Annotated[Service, Depends(_service)]) -> Info:
    header, settings, memory = service.header, service.settings, service.front_door.memory
    workers = [
        WorkerInfo(
            state=ProcessState(int(row["state"])).name.lower(),
            **{name: row[name].item() for name in ("pid", "generation", "largest_batch", "batches", "images", "splits")},
            **{name: row[name].decode(errors="replace") for name in ("device", "engine", "precision", "why", "transfer")},
        )
        for row in memory.workers
    ]
    limits = ("max_body_mb", "max_inflight_mb", "max_megapixels", "timeout_s", "max_batch_size", "batch_wait_ms")
    return Info(
        model=ModelInfo(
            **service.model.model_dump(),
            architecture=header.architecture,
            labels=len(header.labels),
            preprocessing=header.preprocessing.to_dict(),
        ),
        workers=workers,
        limits={name: getattr(settings, name) for name in limits} | {"slots": memory.layout.slots},
        versions=service.versions,
    )


def assemble(app: FastAPI, settings: Settings) -> ASGIApp:
    """Put the routes onto `app`, and around it the shortest way to the busiest of them, CORS and error handling."""
    app.include_router(router)
    whole: ASGIApp = envelope.Direct(app, {("POST", "/predict"): predict})
    if settings.origins:
        whole = CORSMiddleware(whole, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])
    return envelope.Envelope(whole)
