"""The forms in which a request may carry an image -> the bytes of the image file."""

from __future__ import annotations

import base64
import binascii

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.schemas import ApiError, PredictRequest

_MAX_PARTS = 100  # each costs far more than its bytes
_SPACES = str.maketrans("", "", "\r\n\t")
# URL-safe base64 written as plain; and a plus sign that somebody's URL decoding turned into a space.
_ALPHABET = str.maketrans("-_ ", "+/+")


def image_bytes(body: bytes, content_type: str) -> bytes:
    """The one image file in a request body: JSON and multipart are opened, anything else is the file itself.

    Raises ApiError bad_request where there is no image, or more than one.
    """
    if not body:
        raise ApiError("bad_request", "the body is empty; send the bytes of an image file")
    media = content_type.partition(";")[0].strip().lower()
    if media == "application/json" or media.endswith("+json"):
        return _from_json(body)
    if media.startswith("multipart/"):
        return _from_multipart(body, content_type)
    return body


def _from_json(body: bytes) -> bytes:
    try:
        text = PredictRequest.model_validate_json(body).image
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ApiError("bad_request", f'{where}: {first["msg"]}; send {{"image": "<base64 or data URI>"}}') from None
    return decode_base64(text)


def decode_base64(text: str) -> bytes:
    """Base64 as clients really send it: as a data URI, wrapped, URL-safe, unpadded. Raises ApiError bad_request."""
    text = text.strip()
    if text[:5].lower() == "data:":
        prefix, comma, text = text.partition(",")
        if not comma or not prefix.lower().endswith(";base64"):
            raise ApiError("bad_request", "image: a data URI must have the form data:image/jpeg;base64,...")
    text = text.strip().translate(_SPACES).translate(_ALPHABET).rstrip("=")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError("bad_request", f"image: not valid base64 ({error})") from None
    if not data:
        raise ApiError("bad_request", "image: empty; send the bytes of an image file in base64")
    return data


class _Part:
    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.name = self.value = b""
        self.content = bytearray()

    @property
    def is_file(self) -> bool:
        return b"filename" in parse_options_header(self.headers.get(b"content-disposition", b""))[1]


def _from_multipart(body: bytes, content_type: str) -> bytes:
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise ApiError("bad_request", "the multipart content type names no boundary; let the HTTP client set this header")
    parts: list[_Part] = []
    ended = False

    def begin() -> None:
        if len(parts) == _MAX_PARTS:
            raise ApiError("bad_request", f"the multipart body has over {_MAX_PARTS} parts; send one file")
        parts.append(_Part())

    def name(data: bytes, start: int, end: int) -> None:
        parts[-1].name += data[start:end]

    def value(data: bytes, start: int, end: int) -> None:
        parts[-1].value += data[start:end]

    def header_end() -> None:
        part = parts[-1]
        part.headers[part.name.lower()] = part.value
        part.name = part.value = b""

    def content(data: bytes, start: int, end: int) -> None:
        parts[-1].content += data[start:end]

    def finish() -> None:
        nonlocal ended
        ended = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": begin,
                "on_header_field": name,
                "on_header_value": value,
                "on_header_end": header_end,
                "on_part_data": content,
                "on_end": finish,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise ApiError("bad_request", f"the multipart body is malformed ({error})") from None
    if not ended:
        raise ApiError("bad_request", "the multipart body ends before its last boundary; it was cut off or the boundary is wrong")
    files = [part for part in parts if part.is_file] or parts  # a lone plain field holds an image too: curl -F 'image=<cat.jpg'
    if len(files) != 1:
        raise ApiError("bad_request", f"the multipart body has {len(files)} files; send exactly one")
    if not files[0].content:
        raise ApiError("bad_request", "the file in the multipart body is empty")
    return bytes(files[0].content)
