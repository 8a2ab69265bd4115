"""The HTTP routes of our own API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from service import bodies, openapi
from service.frontdoor import Answer, Fill, Refusal
from service.intake import Intake
from service.schemas import (
    ApiError,
    BatchResponse,
    BatchTiming,
    Health,
    ImagePredictions,
    Info,
    ModelInfo,
    PredictResponse,
    Timing,
    WorkerInfo,
    error_body,
)
from service.slots import ProcessState

_MOST_PREDICTIONS = 100_000  # in one answer

router = APIRouter()


@router.post(
    "/predict",
    response_model=PredictResponse,
    responses=openapi.errors(401, classifying=True),
    openapi_extra={"parameters": [openapi.TOP_K], "requestBody": openapi.IMAGE_BODY},
    summary="Classify one image",
    tags=["classify"],
)
async def predict(request: Request) -> Response:
    """The body is the image file itself, one file of a form under any name, or JSON `{"image": "<base64 or data URI>"}`.

    The header `x-timeout-ms` gives the request less time than `timeout_s`; `x-request-id` is kept, returned and logged.
    """
    intake: Intake = request.app.state.intake
    state = request.scope["state"]
    intake.keys.require(request.headers)
    top_k = intake.top_k(request)
    answer = await intake.classify(request)
    response = PredictResponse(
        model=intake.model,
        predictions=intake.predictions(answer.probabilities, top_k),
        request_id=state["request_id"],
        timing_ms=Timing(
            decode=_ms(answer.decode_s), queue=_ms(answer.queue_s), forward=_ms(answer.forward_s), total=_ms_since(state["arrived"])
        ),
    )
    return Response(response.model_dump_json() + "\n", media_type="application/json")  # the line end: for people at a terminal


@router.post(
    "/predict/batch",
    response_model=BatchResponse,
    responses=openapi.errors(401, classifying=True),
    openapi_extra={"parameters": [openapi.TOP_K], "requestBody": openapi.BATCH_BODY},
    summary="Classify several images",
    tags=["classify"],
)
async def predict_batch(request: Request) -> Response:
    """The body is a form with the files, or JSON `{"images": ["<base64 or data URI>", ...]}`.

    An image that can't be classified has `error` in its place, in the form that `/predict` would answer, and the others are not
    touched by it. The whole request fails where nothing can be read from it, or the server could answer none of its images.
    """
    intake: Intake = request.app.state.intake
    state = request.scope["state"]
    intake.keys.require(request.headers)
    top_k = intake.top_k(request)
    times = [0.0, 0.0, 0.0]

    def read(body: bytes) -> Sequence[Fill | Refusal]:
        images = bodies.many_images(body, request.headers.get("content-type", ""))
        if len(images) * top_k > _MOST_PREDICTIONS:
            raise ApiError(
                "bad_request",
                f"top_k: {len(images)} images times {top_k} labels are over {_MOST_PREDICTIONS} predictions; ask for fewer of either",
            )
        return [image if isinstance(image, ApiError) else partial(intake.fill, image) for image in images]

    def keep(answer: Answer) -> ImagePredictions:
        for place, seconds in enumerate((answer.decode_s, answer.queue_s, answer.forward_s)):
            times[place] += seconds
        return ImagePredictions(predictions=intake.predictions(answer.probabilities, top_k))

    found = await intake.classify_many(request, read, keep)
    answered = sum(isinstance(one, ImagePredictions) for one in found) or 1
    decode, queue, forward = (_ms(seconds / answered) for seconds in times)
    response = BatchResponse(
        model=intake.model,
        results=[one if isinstance(one, ImagePredictions) else error_body(one.code, str(one), state["request_id"]) for one in found],
        request_id=state["request_id"],
        timing_ms=BatchTiming(decode=decode, queue=queue, forward=forward, total=_ms_since(state["arrived"])),
    )
    return Response(response.model_dump_json() + "\n", media_type="application/json")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _ms_since(arrived: float) -> float:
    return _ms(time.monotonic() - arrived)


@router.get("/", include_in_schema=False)
async def index() -> Response:
    return RedirectResponse("/docs")


@router.get("/livez", response_model=Health, responses=openapi.errors(503), summary="Whether the processes run", tags=["health"])
async def livez(request: Request) -> Health:
    intake: Intake = request.app.state.intake
    intake.require_alive()
    return Health(status="alive")


@router.get(
    "/readyz", response_model=Health, responses=openapi.errors(503), summary="Whether every device classifies images", tags=["health"]
)
@router.get("/health", response_model=Health, responses=openapi.errors(503), summary="The same as /readyz", tags=["health"])
async def readyz(request: Request) -> Health:
    intake: Intake = request.app.state.intake
    intake.require_ready()
    return Health(status="ready")


@router.get("/info", response_model=Info, responses=openapi.errors(401), summary="What is served, and how", tags=["health"])
async def info(request: Request) -> Info:
    intake: Intake = request.app.state.intake
    intake.keys.require(request.headers)
    header, settings, memory = intake.header, intake.settings, intake.front_door.memory
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
            **intake.model.model_dump(),
            architecture=header.architecture,
            labels=len(header.labels),
            preprocessing=header.preprocessing.to_dict(),
        ),
        workers=workers,
        limits={name: getattr(settings, name) for name in limits} | {"slots": memory.layout.slots},
        versions=intake.versions,
    )
