"""Bodies of requests and responses, and the errors: a stable code, its HTTP status, and a message that says what to do."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

STATUS = {
    "bad_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "image_too_large": 413,
    "not_an_image": 415,
    "unsupported_format": 415,
    "image_corrupt": 422,
    "internal": 500,
    "overloaded": 503,
    "draining": 503,
    "worker_failed": 503,
    "deadline_exceeded": 504,
}


class ApiError(Exception):
    """What a client is told instead of an answer. `code` is a key of STATUS."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, STATUS[code]


class ErrorDetail(BaseModel):
    code: str = Field(description="stable and machine-readable: " + ", ".join(STATUS))
    message: str = Field(description="what is wrong and what to do")
    request_id: str


class ErrorBody(BaseModel):
    error: ErrorDetail


def error_body(code: str, message: str, request_id: str) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(code=code, message=message, request_id=request_id))


class PredictRequest(BaseModel):
    image: str = Field(description="the image file in base64, or as a data URI: data:image/jpeg;base64,...")


class Model(BaseModel):
    name: str
    version: str = Field(description="hash of weights, labels and preprocessing: equal models have equal versions")


class Prediction(BaseModel):
    label: str
    index: int
    probability: float


class Timing(BaseModel):
    decode: float = Field(description="reading the image into pixels")
    queue: float = Field(description="waiting for a slot, a decode thread and a batch")
    forward: float = Field(description="the batch it was in, on the device")
    total: float = Field(description="from the arrival of the request")


class PredictResponse(BaseModel):
    model: Model
    predictions: list[Prediction] = Field(description="the top_k labels, the most probable first")
    request_id: str
    timing_ms: Timing


class Health(BaseModel):
    status: Literal["alive", "ready"]


class ModelInfo(Model):
    architecture: str
    labels: int
    preprocessing: dict[str, Any]


class WorkerInfo(BaseModel):
    pid: int
    device: str
    state: str
    generation: int
    engine: str
    precision: str
    why: str = Field(description="why this engine and this precision")
    transfer: str = Field(description="how pixels reach the device")
    largest_batch: int = Field(description="images that one forward takes now: sizes that are warm, worth it and fit into memory")
    batches: int
    images: int
    splits: int = Field(description="batches that were split because they did not fit into the device's memory")


class Info(BaseModel):
    model: ModelInfo
    workers: list[WorkerInfo]
    limits: dict[str, float | int]
    versions: dict[str, str]
