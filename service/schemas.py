"""Bodies of requests and responses, and the errors: a stable code, its HTTP status, and a message that says what to do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_IMAGES = 512  # of one request: however small, each costs a decode and a place in the answer

STATUS = {
    "bad_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "model_not_found": 404,
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


class ProtocolError(BaseModel):
    """What a client of the Open Inference Protocol reads: its `error` is a sentence."""

    error: str = Field(description="what is wrong and what to do")
    code: str = Field(description="stable and machine-readable: " + ", ".join(STATUS))
    request_id: str


# OpenAPI's name for base64 is the format byte.
Base64 = Annotated[
    str, Field(description="an image file in base64, or as a data URI: data:image/jpeg;base64,...", json_schema_extra={"format": "byte"})
]


class PredictRequest(BaseModel):
    image: Base64


class BatchRequest(BaseModel):
    images: list[Base64] = Field(min_length=1, max_length=MAX_IMAGES)


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


class ImagePredictions(BaseModel):
    predictions: list[Prediction]


class BatchTiming(BaseModel):
    decode: float = Field(description="reading an image into pixels, on average")
    queue: float = Field(description="waiting for a slot, a decode thread and a batch, on average")
    forward: float = Field(description="the batch that an image was in, on the device, on average")
    total: float = Field(description="the whole request, from its arrival")


class BatchResponse(BaseModel):
    model: Model
    results: list[ImagePredictions | ErrorBody] = Field(description="one for each image, in their order; a bad image fails alone")
    request_id: str
    timing_ms: BatchTiming


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


# Open Inference Protocol v2


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata] = Field(description="alternatives: a request has one of them")
    outputs: list[TensorMetadata]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class _InferInput(BaseModel):
    # Required of JSON by itself, which the document describes; where the tensor's bytes follow the JSON there is none.
    model_config = ConfigDict(json_schema_extra=lambda schema: schema["required"].append("data"))
    parameters: dict[str, Any] = Field({}, description="`binary_data_size`: the tensor's bytes follow the JSON, in place of `data`")


class ImageInput(_InferInput):
    """Encoded image files."""

    name: Literal["image"]
    datatype: Literal["BYTES"]
    shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, max_length=1, description="[n]")
    data: list[Base64] = Field([], min_length=1, max_length=MAX_IMAGES)


class PixelsInput(_InferInput):
    """RGB images as the model sees them."""

    name: Literal["pixels"]
    datatype: Literal["UINT8"]
    shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=4, max_length=4, description="[n, crop, crop, 3]")
    data: list[Any] = Field([], min_length=1, description="whole numbers from 0 to 255, flat or nested as the shape says")


class InferOutput(BaseModel):
    name: Literal["probabilities", "logits"]
    parameters: dict[str, Any] = Field({}, description="`classification: k` answers the k best as `value:index:label`; `binary_data`")


class InferRequest(BaseModel):
    id: str | None = Field(None, max_length=1000)
    parameters: dict[str, Any] = Field({}, description="`binary_data_output`: whether outputs follow the JSON where they don't say")
    inputs: list[Annotated[ImageInput | PixelsInput, Field(discriminator="name")]] = Field(min_length=1, max_length=1)
    outputs: list[InferOutput] | None = Field(None, max_length=2, description="none: all of them")


class InferOutputTensor(BaseModel):
    name: str
    datatype: Literal["FP32", "BYTES"]
    shape: list[int]
    parameters: dict[str, Any] | None = None
    data: list[float] | list[str] | None = None


class InferResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferOutputTensor]


# TorchServe


class _TorchServe(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class Ping(_TorchServe):
    status: Literal["Healthy"]


class ListedModel(_TorchServe):
    model_name: str
    model_url: str


class ModelList(_TorchServe):
    models: list[ListedModel]


class WorkerStatus(_TorchServe):
    id: str
    status: str
    pid: int
    gpu: bool


class ModelDescription(_TorchServe):
    model_name: str
    model_version: str
    model_url: str
    runtime: str
    min_workers: int
    max_workers: int
    batch_size: int
    max_batch_delay: float
    loaded_at_startup: bool
    workers: list[WorkerStatus]
