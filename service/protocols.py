"""The same answers in other dialects: the Open Inference Protocol v2, which KServe's and Triton's clients speak, and TorchServe's."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from service import bodies, openapi
from service.frontdoor import Answer, Fill, Pixels, Refusal
from service.intake import Intake, best
from service.schemas import (
    MAX_IMAGES,
    ApiError,
    ImageInput,
    InferOutput,
    InferRequest,
    InferResponse,
    ListedModel,
    Live,
    ModelDescription,
    ModelList,
    ModelMetadata,
    ModelReady,
    Ping,
    PixelsInput,
    ProtocolError,
    Ready,
    ServerMetadata,
    TensorMetadata,
    WorkerStatus,
)
from service.slots import ProcessState

router = APIRouter()
Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Any]])


def _route(*paths: str, tag: str, methods: Sequence[str] = ("GET",), **documentation: Any) -> Callable[[Endpoint], Endpoint]:
    def register(endpoint: Endpoint) -> Endpoint:
        for path, method in product(paths, methods):
            router.add_api_route(path, endpoint, methods=[method], tags=[tag], **documentation)
        return endpoint

    return register


def _intake(request: Request, *, open_to_all: bool = False) -> Intake:
    """Raises ApiError unauthorized, and model_not_found where the path names another model than the one that is served."""
    intake: Intake = request.app.state.intake
    if not open_to_all:
        intake.keys.require(request.headers)
    name, version = request.path_params.get("model"), request.path_params.get("version")
    if name not in (None, intake.model.name) or version not in (None, intake.model.version):
        asked = f"{name} in version {version}" if version else name
        raise ApiError(
            "model_not_found", f"no model {str(asked)[:200]} here; this is {intake.model.name} in version {intake.model.version}"
        )
    return intake


# Open Inference Protocol v2

_v2 = partial(_route, tag="Open Inference Protocol")
_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
HEADER_LENGTH = "inference-header-content-length"
_OUTPUTS = ("probabilities", "logits")
_MOST_NUMBERS = 10_000_000  # in a JSON tensor
_MOST_RESULTS = 4_000_000  # numbers in an answer
_errors = partial(openapi.errors, model=ProtocolError)
_EXAMPLE = '{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["<base64>"]}]}, or tensors flat or binary'


@_v2("/v2", response_model=ServerMetadata, responses=_errors(401), summary="The server")
async def server_metadata(request: Request) -> ServerMetadata:
    intake = _intake(request)
    extensions = ["classification", "binary_tensor_data"]
    return ServerMetadata(name="spyglass", version=intake.versions["spyglass"], extensions=extensions)


@_v2("/v2/health/live", response_model=Live, responses=_errors(503), summary="Whether the processes run")
async def live(request: Request) -> Live:
    _intake(request, open_to_all=True).require_alive()
    return Live(live=True)


@_v2("/v2/health/ready", response_model=Ready, responses=_errors(503), summary="Whether every device classifies images")
async def ready(request: Request) -> Ready:
    _intake(request, open_to_all=True).require_ready()
    return Ready(ready=True)


@_v2(*(path + "/ready" for path in _MODEL), response_model=ModelReady, responses=_errors(404, 503), summary="Whether the model is ready")
async def model_ready(request: Request) -> ModelReady:
    intake = _intake(request, open_to_all=True)
    intake.require_ready()
    return ModelReady(name=intake.model.name, ready=True)


@_v2(*_MODEL, response_model=ModelMetadata, responses=_errors(401, 404), summary="The model's tensors")
async def model_metadata(request: Request) -> ModelMetadata:
    intake = _intake(request)
    crop, classes = intake.header.preprocessing.crop, len(intake.header.labels)
    return ModelMetadata(
        name=intake.model.name,
        versions=[intake.model.version],
        platform="spyglass",
        inputs=[
            TensorMetadata(name="image", datatype="BYTES", shape=[-1]),
            TensorMetadata(name="pixels", datatype="UINT8", shape=[-1, crop, crop, 3]),
        ],
        outputs=[TensorMetadata(name=name, datatype="FP32", shape=[-1, classes]) for name in _OUTPUTS],
    )


@_v2(
    *(path + "/infer" for path in _MODEL),
    methods=["POST"],
    response_model=InferResponse,
    responses=_errors(401, 404, classifying=True),
    openapi_extra={"requestBody": openapi.INFER_BODY},
    summary="Classify images",
)
async def infer(request: Request) -> Response:
    """One input, `image` (encoded files; base64 in JSON) or `pixels` (what the model sees); outputs `probabilities` and `logits`.

    An output with the parameter `classification: k` comes as BYTES [n, k], `value:index:label`. Tensors may be binary.
    """
    intake = _intake(request)
    inference = _Inference(intake, request.headers.get(HEADER_LENGTH))
    answers: list[Answer] = []
    for number, answer in enumerate(await intake.classify_many(request, inference.read, lambda answer: answer)):
        if isinstance(answer, Exception):  # the protocol knows no error of one image among several
            raise ApiError(answer.code, f"image {number}: {answer}")
        answers.append(answer)
    deadline, gone = intake.deadline(request), request.scope["state"]["gone"]
    content, length = await intake.front_door.run(partial(inference.respond, answers), deadline, gone)
    if length is None:
        return Response(content, media_type="application/json")
    return Response(content, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})


class _Inference:
    """One inference: the request out of a body, the response out of answers. Both run beside the event loop."""

    def __init__(self, intake: Intake, header_length: str | None) -> None:
        self.intake, self.header_length = intake, header_length
        self.request: InferRequest | None = None  # none: the body is an image file

    def read(self, body: bytes) -> Sequence[Fill | Refusal]:
        """What fills the slots. Raises ApiError bad_request."""
        length = self.header_length
        if length is not None and not (length.isascii() and length.isdecimal() and len(length) < 12 and int(length) <= len(body)):
            raise ApiError(
                "bad_request", f"Inference-Header-Content-Length: {length[:100]!r} must be the length of the JSON, at most the body's"
            )
        if (length is not None and int(length) == 0) or (length is None and bodies.begins_like_an_image(body)):
            return [partial(self.intake.fill, body)]
        size = len(body) if length is None else int(length)
        self.request = bodies.read_json(InferRequest, memoryview(body)[:size], _EXAMPLE, _MOST_NUMBERS)
        self._check_outputs(self.request.outputs or [])
        (tensor,) = self.request.inputs
        binary = memoryview(body)[size:]
        announced = tensor.parameters.get("binary_data_size")
        if announced is None and not tensor.data:
            message = "has neither data nor the parameter binary_data_size; shared memory is not read"
            raise ApiError("bad_request", f"inputs.0: {tensor.name} {message}")
        if len(binary) != (announced or 0) or isinstance(announced, bool) or (announced is not None and tensor.data):
            message = f"{len(binary)} bytes follow the JSON, and binary_data_size is {str(announced)[:100]}; give their number, and no data"
            raise ApiError("bad_request", f"inputs.0: {message}")
        fills = self._images(tensor, binary) if isinstance(tensor, ImageInput) else self._pixels(tensor, binary)
        self.request.inputs = []  # may be large
        classes = len(self.intake.header.labels)
        if len(fills) > MAX_IMAGES or len(fills) * classes > _MOST_RESULTS:
            raise ApiError(
                "bad_request", f"inputs.0: {len(fills)} images; send at most {min(MAX_IMAGES, _MOST_RESULTS // classes)} at once"
            )
        return fills

    def _check_outputs(self, outputs: Sequence[InferOutput]) -> None:
        for number, output in enumerate(outputs):
            k = output.parameters.get("classification")
            if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
                raise ApiError(
                    "bad_request", f"outputs.{number}.parameters.classification: must be a whole number from 1, not {str(k)[:100]}"
                )
            if "shared_memory_region" in output.parameters:
                raise ApiError("bad_request", f"outputs.{number}: shared memory is not written; ask for binary_data")

    def _images(self, tensor: ImageInput, binary: memoryview) -> Sequence[Fill | Refusal]:
        if tensor.data:
            found = [bodies.decode_base64(text, f"inputs.0.data.{number}") for number, text in enumerate(tensor.data)]
        else:
            found = [bytes(element) for element in _elements(binary)]
        if len(found) != tensor.shape[0]:
            raise ApiError("bad_request", f"inputs.0: shape says {tensor.shape[0]} images, and there are {len(found)}")
        return [partial(self.intake.fill, image) for image in found]

    def _pixels(self, tensor: PixelsInput, binary: memoryview) -> Sequence[Fill | Refusal]:
        crop = self.intake.header.preprocessing.crop
        if tensor.shape[1:] != [crop, crop, 3]:
            raise ApiError("bad_request", f"inputs.0: pixels must have the shape [n, {crop}, {crop}, 3], not {str(tensor.shape)[:100]}")
        data = _flat(tensor.data, tensor.shape) if tensor.data else binary
        if len(data) != tensor.shape[0] * crop * crop * 3:
            raise ApiError("bad_request", f"inputs.0: shape {str(tensor.shape)[:100]} does not fit {len(data)} values")
        pixels = np.frombuffer(data, np.uint8).reshape(tensor.shape)
        return [partial(_copy, image) for image in pixels]

    def respond(self, answers: Sequence[Answer]) -> tuple[bytes, int | None]:
        """The body, and the length of the JSON in it where binary tensors follow."""
        request = self.request or InferRequest.model_construct()
        outputs, blobs = [], []
        for output in request.outputs or [InferOutput.model_construct(name=name) for name in _OUTPUTS]:
            values = np.stack([getattr(answer, output.name) for answer in answers])
            binary = output.parameters.get("binary_data", request.parameters.get("binary_data_output", False))
            k = output.parameters.get("classification")
            rows: list[Any] = list(values) if k is None else [self._classes(row, k) for row in values]
            described: dict[str, Any] = {
                "name": output.name,
                "datatype": "FP32" if k is None else "BYTES",
                "shape": [len(rows), len(rows[0])],
            }
            if binary is True:
                blob = values.astype("<f4").tobytes() if k is None else b"".join(map(_element, chain.from_iterable(rows)))
                described["parameters"] = {"binary_data_size": len(blob)}
                blobs.append(blob)
                outputs.append(to_json(described))
            else:
                numbers = b",".join(to_json(row if isinstance(row, list) else row.tolist())[1:-1] for row in rows)
                outputs.append(to_json(described)[:-1] + b',"data":[' + numbers + b"]}")
        model = self.intake.model
        head = {"model_name": model.name, "model_version": model.version} | ({} if request.id is None else {"id": request.id})
        content = to_json(head)[:-1] + b',"outputs":[' + b",".join(outputs) + b"]}"
        return (content + b"".join(blobs), len(content)) if blobs else (content, None)

    def _classes(self, row: npt.NDArray[np.float32], k: int) -> list[str]:
        labels = self.intake.header.labels
        return [f"{row[index]:f}:{index}:{labels[index]}" for index in best(row, k)]


def _copy(image: Pixels, pixels: Pixels) -> None:
    pixels[:] = image


def _elements(tensor: memoryview) -> list[memoryview]:
    """The elements of a binary BYTES tensor, each led by its length in 4 bytes. Raises ApiError bad_request."""
    found: list[memoryview] = []
    position = 0
    while position < len(tensor):
        if len(tensor) - position < 4 or len(found) > MAX_IMAGES:
            break
        (length,) = struct.unpack_from("<I", tensor, position)
        found.append(tensor[position + 4 : position + 4 + length])
        position += 4 + length
    if position != len(tensor):
        raise ApiError(
            "bad_request", f"inputs.0: the binary tensor must be 1 to {MAX_IMAGES} images, each led by its length in 4 bytes, little-endian"
        )
    return found


def _element(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _flat(data: list[Any], shape: list[int]) -> bytes:
    """Numbers from 0 to 255, nested as the shape says or flat. Raises ApiError bad_request."""
    try:
        if isinstance(data[0], list):
            for length in shape[1:]:
                if set(map(len, data)) != {length}:
                    raise ApiError("bad_request", f"inputs.0.data: its nesting does not fit the shape {shape}")
                data = list(chain.from_iterable(data))
        return bytes(data)
    except (TypeError, ValueError, IndexError):
        raise ApiError("bad_request", "inputs.0.data: pixels takes whole numbers from 0 to 255, flat or nested as the shape says") from None


# TorchServe

_torchserve = partial(_route, tag="TorchServe")


@_torchserve(
    "/predictions/{model}",
    "/predictions/{model}/{version}",
    methods=["POST", "PUT"],
    response_model=dict[str, float],
    responses=openapi.errors(401, 404, classifying=True),
    openapi_extra={"parameters": [openapi.TOP_K], "requestBody": openapi.IMAGE_BODY},
    summary="Classify one image",
)
async def predictions(request: Request) -> Response:
    """The body is as for `/predict`; the answer is the most probable labels, each with its probability."""
    intake = _intake(request)
    top_k = intake.top_k(request)
    answer = await intake.classify(request)
    found = {one.label: one.probability for one in intake.predictions(answer.probabilities, top_k)}
    return Response(to_json(found) + b"\n", media_type="application/json")


@_torchserve("/ping", response_model=Ping, responses=openapi.errors(503), summary="Whether every device classifies images")
async def ping(request: Request) -> Ping:
    _intake(request, open_to_all=True).require_ready()
    return Ping(status="Healthy")


@_torchserve("/models", response_model=ModelList, responses=openapi.errors(401), summary="The models: one")
async def models(request: Request) -> ModelList:
    intake = _intake(request)
    return ModelList(models=[ListedModel(model_name=intake.model.name, model_url=intake.settings.checkpoint.name)])


@_torchserve(
    "/models/{model}",
    "/models/{model}/{version}",
    response_model=list[ModelDescription],
    responses=openapi.errors(401, 404),
    summary="The model and its workers",
)
async def describe_model(request: Request) -> list[ModelDescription]:
    intake = _intake(request)
    settings, rows = intake.settings, intake.front_door.memory.workers
    return [
        ModelDescription(
            model_name=intake.model.name,
            model_version=intake.model.version,
            model_url=settings.checkpoint.name,
            runtime="python",
            min_workers=len(rows),
            max_workers=len(rows),
            batch_size=settings.max_batch_size,
            max_batch_delay=settings.batch_wait_ms,
            loaded_at_startup=True,
            workers=[
                WorkerStatus(
                    id=str(index),
                    status="READY" if row["state"] == ProcessState.READY else "UNLOADING",
                    pid=int(row["pid"]),
                    gpu=row["device"].startswith(b"cuda"),
                )
                for index, row in enumerate(rows)
            ],
        )
    ]
