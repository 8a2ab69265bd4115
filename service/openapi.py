"""What the OpenAPI document says beyond what FastAPI finds out by itself: body forms, errors, keys."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from models.checkpoint import Header
from models.images import FORMATS
from service.schemas import MAX_IMAGES, STATUS, BatchRequest, ErrorBody, InferRequest, PredictRequest

Document = dict[str, Any]

_ID = {"description": "the request's own, or one that was made", "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "seconds", "schema": {"type": "integer", "minimum": 0}}
_WHEN = {
    400: "malformed request",
    401: "a key is needed",
    404: "no such model",
    413: "over `max_body_mb`, or over `max_megapixels`, known from the header before decoding",
    415: "bytes that are no image, or a format that is not decoded",
    422: "an image that does not decode to its end",
    500: "never a trace",
    503: "with `Retry-After`",
    504: "`timeout_s`, or the request's shorter `x-timeout-ms`, counted from its arrival",
}
_KEYS = {"X-API-Key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}, "Bearer": {"type": "http", "scheme": "bearer"}}
_CLASSIFYING = (400, 413, 415, 422, 500, 503, 504)


def errors(*more: int, classifying: bool = False, model: type[BaseModel] = ErrorBody) -> dict[int | str, Document]:
    """Documentation of an operation's errors: `more`, those of any operation, and those of reading and classifying images."""
    found: dict[int | str, Document] = {}
    for status in sorted({400, 500, *more, *(_CLASSIFYING if classifying else ())}):
        codes = ", ".join(f"`{code}`" for code, own in STATUS.items() if own == status and code not in ("not_found", "method_not_allowed"))
        found[status] = {"model": model, "description": f"{codes}: {_WHEN[status]}"}
    return found


TOP_K = {
    "name": "top_k",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "title": "Top K"},
    "description": "how many labels to answer; more than there are gives all",
}
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mM4UaEBAAN0AWn1BwN7AAAAAElFTkSuQmCC"  # the smallest of images
_FILE = {"type": "string", "format": "binary"}
_ONE = {"type": "object", "properties": {"image": _FILE}, "required": ["image"]}
_TEXT = {
    "type": "object",
    "properties": {"image": {"type": "string", "format": "byte", "minLength": 1}},
    "required": ["image"],
}
IMAGE_BODY = {
    "required": True,
    "description": f"one image ({', '.join(FORMATS)}): the file itself, one file of a form under any name, or base64 in JSON or a form",
    "content": {
        "image/*": {"schema": _FILE},
        "application/octet-stream": {"schema": _FILE},
        "multipart/form-data": {"schema": _ONE},
        "application/x-www-form-urlencoded": {"schema": _TEXT},
        "application/json": {"schema": PredictRequest.model_json_schema(), "example": {"image": _PIXEL}},
    },
}
BATCH_BODY = {
    "required": True,
    "description": f"1 to {MAX_IMAGES} images: files of a form under any names, or base64 in JSON",
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"images": {"type": "array", "items": _FILE, "minItems": 1, "maxItems": MAX_IMAGES}},
                "required": ["images"],
            }
        },
        "application/json": {"schema": BatchRequest.model_json_schema(), "example": {"images": [_PIXEL]}},
    },
}


INFER_BODY = {
    "required": True,
    "description": "JSON; or JSON with binary tensors behind it and its own length in the header `Inference-Header-Content-Length`; "
    "or one image file and nothing else",
    "content": {
        "application/json": {
            "schema": InferRequest.model_json_schema(ref_template="#/components/schemas/{model}"),
            "example": {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [_PIXEL]}]},
        },
        "application/octet-stream": {"schema": _FILE},
    },
}


def document(app: FastAPI, header: Header, *, keyed: bool) -> Document:
    """The whole document. `keyed`: whether keys are set; where none are, nothing needs one."""
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    names = {"model": f"the model's name: {header.name}", "version": f"the model's version: {header.version}"}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["parameters"] = operation.get("parameters", []) + [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": names[name]}
                for name in re.findall(r"{(\w+)}", path)
            ]
            for media in operation.get("requestBody", {}).get("content", {}).values():
                made["components"]["schemas"].update(media["schema"].get("$defs", {}))
                media["schema"] = {name: value for name, value in media["schema"].items() if name != "$defs"}
            answers = operation["responses"]
            if not keyed:
                answers.pop("401", None)
            elif "401" in answers:
                operation["security"] = [{name: []} for name in _KEYS]
            for status, answer in answers.items():
                answer["headers"] = {"x-request-id": _ID, **({"retry-after": _RETRY_AFTER} if status == "503" else {})}
    shape = made["components"]["schemas"]["PixelsInput"]["properties"]["shape"]
    sides = [{"type": "integer", "minimum": 1}, *({"const": side} for side in (header.preprocessing.crop, header.preprocessing.crop, 3))]
    shape |= {"prefixItems": sides, "items": False}
    if keyed:
        made["components"]["securitySchemes"] = _KEYS
    return made
