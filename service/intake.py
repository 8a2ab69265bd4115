"""What routes share: who may ask, until when, how much; the body of a request, and what the model says of the images in it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import Request

from models.checkpoint import Header
from models.images import ImageError
from service import bodies
from service.frontdoor import Answer, ClientGone, Fill, FrontDoor, Pixels, Refusal
from service.schemas import ApiError, Model, Prediction
from service.settings import Settings
from service.slots import ProcessState

_FEW = 16  # labels that are found sooner one by one than by sorting a thousand
T = TypeVar("T")


class Keys:
    """The accepted keys: several, so that one can be replaced by another while both are good. None: open to everyone."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def require(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError unauthorized where there is a key and the request has none of them."""
        if not self._digests:
            return
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), credentials.strip() if scheme.lower() == "bearer" else ""]
        # Every key is compared, each in constant time: the answer's delay says nothing about them, nor about their lengths.
        if not any([hmac.compare_digest(_digest(one.encode("latin-1")), key) for one in given for key in self._digests]):
            raise ApiError("unauthorized", "send a valid key as `X-API-Key: KEY` or `Authorization: Bearer KEY`")


class Intake:
    """One in each front-door process, where routes find it as `request.app.state.intake`."""

    def __init__(self, settings: Settings, header: Header, front_door: FrontDoor) -> None:
        self.settings, self.header, self.front_door = settings, header, front_door
        self.model = Model(name=header.name, version=header.version)
        self.keys = Keys(settings.keys)
        self.body_limit = int(settings.max_body_mb * 1e6)
        self.max_pixels = int(settings.max_megapixels * 1e6)
        self.inflight_limit = max(self.body_limit, int(settings.max_inflight_mb * 1e6) // front_door.memory.layout.doors)
        self.inflight = 0  # bytes of request bodies in this process
        self.versions = {name: version(name) for name in ("spyglass", "litserve", "openvino", "torch", "torchvision", "pillow")}

    def require_alive(self) -> None:
        """Raises ApiError worker_failed where a process has died."""
        if (self.front_door.memory.workers["state"] == ProcessState.DEAD).any():
            raise ApiError("worker_failed", "a worker process died")

    def require_ready(self) -> None:
        """Raises ApiError draining or worker_failed where this server should get no requests now."""
        if problem := self.front_door.not_ready(self.settings.worker_timeout_s):
            raise ApiError(*problem)

    def top_k(self, request: Request) -> int:
        """How many labels to answer: what the query asks for, or the setting; at most all."""
        asked = request.query_params.get("top_k") if request.scope["query_string"] else None
        if asked is None:
            return min(self.settings.top_k, len(self.header.labels))
        if not (asked.isascii() and asked.isdecimal() and asked.strip("0")):
            raise ApiError("bad_request", f"top_k: must be a whole number from 1, not {asked[:100]!r}")
        return min(int(asked) if len(asked) < 10 else len(self.header.labels), len(self.header.labels))

    def deadline(self, request: Request) -> float:
        """When the answer must be out, in monotonic seconds: after timeout_s, or the client's shorter x-timeout-ms."""
        timeout = self.settings.timeout_s
        asked = request.headers.get("x-timeout-ms")
        if asked is not None:
            if not (asked.isascii() and asked.isdecimal() and len(asked) < 12 and int(asked) > 0):
                raise ApiError("bad_request", f"x-timeout-ms: {asked[:100]!r} must be a whole number of milliseconds from 1")
            timeout = min(timeout, int(asked) / 1000)
        arrived: float = request.scope["state"]["arrived"]
        return arrived + timeout

    async def read_body(self, request: Request, deadline: float) -> bytes:
        """The whole body, decompressed, never more than the limits. The caller takes its length off `inflight` when done with it."""
        # Made when it is raised: an error that its own frame holds would hold the body, too, until the garbage collector comes.
        too_large = partial(
            ApiError, "body_too_large", f"the body is over {self.settings.max_body_mb:g} MB; send less at once (max_body_mb)"
        )
        declared = request.headers.get("content-length", "").lstrip("0")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self.body_limit):
            raise too_large()
        inflate = _inflater(request.headers.get("content-encoding"))
        chunks: list[bytes] = []
        size = received = 0
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    received += len(chunk)
                    if inflate:
                        chunk = inflate(chunk, self.body_limit - size + 1, not more)
                    size += len(chunk)
                    self.inflight += len(chunk)
                    chunks.append(chunk)
                    if max(size, received) > self.body_limit:
                        raise too_large()
                    if self.inflight > self.inflight_limit:
                        raise ApiError("overloaded", "too many bytes of requests in flight (max_inflight_mb); try again later or slower")
                    if not more:
                        return b"".join(chunks) if len(chunks) > 1 else chunk
        except BaseException as error:
            self.inflight -= size
            if isinstance(error, TimeoutError):
                raise ApiError("deadline_exceeded", "the deadline passed before the whole body had arrived") from None
            raise

    async def classify(self, request: Request) -> Answer:
        """The one image of a request, in any form. Raises ApiError, ImageError, ClientGone."""
        deadline = self.deadline(request)
        body = await self.read_body(request, deadline)
        try:
            content_type, gone = request.headers.get("content-type", ""), request.scope["state"]["gone"]
            fill = partial(self._fill_from_body, body, content_type)
            if len(body) > bodies.LARGE and not content_type.startswith("image/"):
                image = await self.front_door.run(partial(bodies.one_image, body, content_type), deadline, gone)
                fill = partial(self.fill, image)
            return await self.front_door.classify(fill, deadline, gone)
        finally:
            self.inflight -= len(body)

    async def classify_many(
        self, request: Request, read: Callable[[bytes], Sequence[Fill | Refusal]], then: Callable[[Answer], T]
    ) -> list[T | Refusal]:
        """The images that `read`, beside the event loop, finds in the body; `then` turns each answer into what is kept of it.

        Raises what `read` raises, ApiError and ClientGone; but where no image was answered, for reasons of the server's, the first.
        """
        deadline, gone = self.deadline(request), request.scope["state"]["gone"]
        body = await self.read_body(request, deadline)
        size = len(body)
        try:
            images = await self.front_door.run(partial(read, body), deadline, gone)
            del body  # the images are what is left of it
            found = await self.front_door.classify_many(images, deadline, gone, then)
        finally:
            self.inflight -= size
        if isinstance(found[0], ApiError) and all(isinstance(one, ApiError) and one.status >= 500 for one in found):
            raise found[0]
        return found

    def _fill_from_body(self, body: bytes, content_type: str, pixels: Pixels) -> None:
        """Decode a request body into a slot. Runs in a decode thread."""
        image = bodies.one_image(body, content_type)
        try:
            self.fill(image, pixels)
        except ImageError as error:
            if error.code == "image_corrupt" and content_type.startswith("application/x-www-form-urlencoded"):
                # What `curl -d @file` sends, having dropped every line end.
                raise ImageError(error.code, f"{error} With curl, send a file by --data-binary, not by -d.") from error
            if error.code == "not_an_image" and image is body and body[:200].isascii():
                raise ImageError(error.code, f'{error} Base64 goes into JSON: {{"image": "<base64>"}}.') from error
            raise

    def fill(self, image: bytes, pixels: Pixels) -> None:
        """Decode an image file into a slot. Runs in a decode thread. Raises ImageError."""
        self.header.preprocessing.read(image, max_pixels=self.max_pixels, out=pixels)

    def predictions(self, probabilities: npt.NDArray[np.float32], top_k: int) -> list[Prediction]:
        """The `top_k` most probable labels; of equals the lower index first."""
        labels = self.header.labels
        return [
            Prediction(label=labels[index], index=index, probability=float(probabilities[index])) for index in best(probabilities, top_k)
        ]


def best(values: npt.NDArray[np.float32], count: int) -> list[int]:
    """Indices of the `count` largest of `[C]` values, the largest first; of equals the lower index first."""
    if count > _FEW:
        found: list[int] = np.argsort(-values, kind="stable")[:count].tolist()
        return found
    left, found = values.copy(), []
    for _ in range(min(count, len(values))):
        found.append(int(left.argmax()))
        left[found[-1]] = -np.inf
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _inflater(encoding: str | None) -> Callable[[bytes, int, bool], bytes] | None:
    """Undoes gzip or deflate chunk by chunk, never giving more than is asked for; None where there is nothing to undo."""
    if encoding is None or encoding.strip().lower() in ("", "identity"):
        return None
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(
            "bad_request", f"content-encoding: {encoding[:100]!r} is not understood; send the body as it is, or in gzip or deflate"
        )
    stream = zlib.decompressobj(47)  # either kind, as its first bytes say

    def inflate(chunk: bytes, most: int, last: bool) -> bytes:
        if stream.eof and chunk:  # zlib would keep them, uncounted
            raise ApiError("bad_request", f"content-encoding: bytes follow the end of the {encoding} body; send one stream")
        try:
            data = stream.decompress(chunk, most)
        except zlib.error:
            raise ApiError("bad_request", f"content-encoding: the body is not in {encoding}; send it as it is") from None
        if stream.unused_data:
            raise ApiError("bad_request", f"content-encoding: bytes follow the end of the {encoding} body; send one stream")
        if last and not stream.eof and not stream.unconsumed_tail:
            raise ApiError("bad_request", f"content-encoding: the {encoding} body was cut off; send it whole")
        return data

    return inflate
