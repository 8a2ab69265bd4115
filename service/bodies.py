"""The forms in which a request may carry images -> the bytes of the image files."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from models import images
from service.schemas import MAX_IMAGES, ApiError, BatchRequest, PredictRequest

_MAX_FIELDS = MAX_IMAGES + 100  # of a form: each costs far more than its bytes
_MAX_VALUES = 100_000  # of a JSON document, likewise
_MAX_LISTS = 250_000  # in one, and objects: the parser keeps the GIL, and each takes it five times as long as a number
# Bytes. Opening a form or JSON of more takes long, and ten times its memory: callers do it one at a time, beside the decode threads.
LARGE = 1_000_000
_WHITE = b"\r\n\t"
# URL-safe base64 written as plain; and a plus sign that somebody's URL decoding turned into a space.
_ALPHABET = bytes.maketrans(b"-_ ", b"+/+")
_NAMES = (b"image", b"images", b"image[]", b"images[]")  # fields that hold an image where a form has others, too

Document = TypeVar("Document", bound=BaseModel)


def media_type(content_type: str) -> str:
    """`image/png` of `Image/PNG; charset=utf-8`."""
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    media = media_type(content_type)
    return media == "application/json" or media.endswith("+json")


def one_image(body: bytes, content_type: str) -> bytes:
    """The one image file in a request body: JSON and forms are opened, anything else is the file itself.

    Raises ApiError bad_request where there is no image, or more than one.
    """
    if not body:
        raise ApiError("bad_request", "the body is empty; send the bytes of an image file")
    if is_json(content_type):
        return decode_base64(read_json(PredictRequest, body, '{"image": "<base64 or data URI>"}').image, "image")
    fields = _form(body, content_type)
    if fields is None:
        return body
    found = _images_among(fields)
    if len(found) != 1:
        raise ApiError("bad_request", f"the form has {len(found)} images; send exactly one, or several to /predict/batch")
    return found[0].image()


def many_images(body: bytes, content_type: str) -> list[bytes | ApiError]:
    """The image files in a form or JSON, in their order; in the place of one whose base64 is broken, what is wrong with it.

    Raises ApiError bad_request where there is none, or more than MAX_IMAGES; and ImageError.
    """
    if not body:
        raise ApiError("bad_request", 'the body is empty; send several files as multipart/form-data, or JSON {"images": [...]}')
    if is_json(content_type):
        texts = read_json(BatchRequest, body, '{"images": ["<base64 or data URI>", ...]}').images
        return [_or_error(partial(decode_base64, text, f"images.{number}")) for number, text in enumerate(texts)]
    fields = _form(body, content_type)
    if fields is None:
        raise ApiError("bad_request", 'send several files as multipart/form-data, or JSON {"images": [...]}; /predict takes one file')
    found = _images_among(fields)
    if not 1 <= len(found) <= MAX_IMAGES:
        raise ApiError("bad_request", f"the form has {len(found)} images; send 1 to {MAX_IMAGES}")
    return [_or_error(one.image) if one.is_file else _checked(one.image()) for one in found]


def read_json(kind: type[Document], body: bytes | memoryview, example: str, most: int = _MAX_VALUES) -> Document:
    """A JSON body of one kind. Raises ApiError bad_request naming the field, and where it has over `most` values."""
    body = bytes(body)
    lists = body.count(b"[") + body.count(b"{")
    if lists > _MAX_LISTS or lists + body.count(b",") > most:
        raise ApiError("bad_request", f"the JSON has over {most} values or {_MAX_LISTS} lists; send {example}")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ApiError("bad_request", f"{where[:200]}: {first['msg'][:200]}; send {example}") from None


def decode_base64(text: str | bytes, name: str) -> bytes:
    """Base64 as clients really send it: as a data URI, percent-encoded, wrapped, URL-safe, unpadded.

    Raises ApiError bad_request naming the field `name`.
    """
    data = text.encode(errors="replace") if isinstance(text, str) else text
    data = data.strip()
    if b"%" in data:
        data = _unquote(data).strip()
    if data[:5].lower() == b"data:":
        prefix, comma, data = data.partition(b",")
        if not comma or not prefix.rstrip().lower().endswith(b";base64"):
            raise ApiError("bad_request", f"{name}: a data URI must have the form data:image/jpeg;base64,...")
    if data[:8].lower().startswith((b"http://", b"https://")):
        raise ApiError("bad_request", f"{name}: addresses are not fetched; send the image file itself, in base64")
    data = data.strip().translate(_ALPHABET, _WHITE).rstrip(b"=")
    try:
        data = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError("bad_request", f"{name}: not valid base64 ({error})") from None
    if not data:
        raise ApiError("bad_request", f"{name}: empty; send the bytes of an image file in base64")
    return data


def _or_error(image: Callable[[], bytes]) -> bytes | ApiError:
    try:
        return image()
    except ApiError as error:
        return error


_DIGITS = np.full(256, 255, np.uint8)  # of hexadecimal numbers, by their letters
_DIGITS[np.frombuffer(b"0123456789abcdefABCDEF", np.uint8)] = [*range(16), *range(10, 16)]


def _unquoted(data: npt.NDArray[np.uint8]) -> bytes:
    """As urllib.parse.unquote_to_bytes, which takes seconds for a body of percent signs."""
    at = np.flatnonzero(data[:-2] == ord("%"))
    high, low = _DIGITS[data[at + 1]], _DIGITS[data[at + 2]]
    good = (high < 16) & (low < 16)
    out, keep = data.copy(), np.ones(len(data), bool)
    out[at[good]] = high[good] << 4 | low[good]
    keep[at[good] + 1] = keep[at[good] + 2] = False
    return out[keep].tobytes()


def _unquote(data: bytes) -> bytes:
    """Undo percent-encoding. In pieces: a body of nothing but escapes would become as many objects as it has bytes."""
    pieces, start = [], 0
    while start < len(data):
        end = start + 65536
        end -= next((back for back in (1, 2) if data[end - back : end - back + 1] == b"%"), 0)  # no escape is cut in two
        pieces.append(_unquoted(np.frombuffer(data[start:end], np.uint8)))
        start = end
    return b"".join(pieces)


@dataclass
class _Field:
    """A field of a form: a file, or a value that may be one in base64."""

    name: bytes = b""
    content: bytearray | bytes = field(default_factory=bytearray)
    is_file: bool = False
    encoding: bytes = b""  # its content-transfer-encoding: some mail-like clients send base64 so

    def image(self) -> bytes:
        """The image file. Raises ApiError bad_request where there is none."""
        name = self.name.decode(errors="replace")[:100] or "the file"
        if not self.content:
            raise ApiError("bad_request", f"{name}: the file is empty")
        content = bytes(self.content)
        if self.encoding == b"base64":
            return decode_base64(content, name)
        if self.is_file or begins_like_an_image(content):
            return content
        try:
            return decode_base64(content, name)
        except ApiError as error:
            raise ApiError("bad_request", f"{error} nor an image file; with curl, a file is sent by {name}=@photo.jpg") from None


def _checked(image: bytes) -> bytes:
    """A form whose plain fields are no images was not meant as one: the whole of it is refused. Raises ImageError."""
    images.sniff(image)
    return image


def begins_like_an_image(data: bytes) -> bool:
    """Whether it is an image by its first bytes, of a format that is decoded here or not."""
    try:
        images.sniff(data)
    except images.ImageError as error:
        return error.code != "not_an_image"
    return True


def _images_among(fields: list[_Field]) -> list[_Field]:
    """Those that hold images: the files; else the fields with the right names; else a lone field, whatever its name."""
    files = [one for one in fields if one.is_file]
    named = [one for one in fields if one.name.lower() in _NAMES]
    return files or named or (fields if len(fields) == 1 else [])


def _form(body: bytes, content_type: str) -> list[_Field] | None:
    """The fields of a form in their order; None where the body is none, but a file: `curl --data-binary` calls everything a form."""
    media = media_type(content_type)
    if media.startswith("multipart/"):
        return _multipart(body, content_type)
    if media == "application/x-www-form-urlencoded" and not begins_like_an_image(body):
        return _urlencoded(body)
    return None


_FORM_BEGINS = re.compile(rb"[\w.\-\[\]%+]{1,100}=")


def _urlencoded(body: bytes) -> list[_Field] | None:
    if not _FORM_BEGINS.match(body):
        return None  # curl sends any file under this type, so whatever it is, the decoder will say what is wrong with it
    if body.count(b"&") >= _MAX_FIELDS:
        raise ApiError("bad_request", f"the form has over {_MAX_FIELDS} fields; send images only")
    pairs = (pair.partition(b"=") for pair in body.split(b"&") if pair)
    return [_Field(_unquote(name.replace(b"+", b" ")), _unquote(value.replace(b"+", b" "))) for name, _, value in pairs]


def _multipart(body: bytes, content_type: str) -> list[_Field]:
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise ApiError("bad_request", "the multipart content type names no boundary; let the HTTP client set this header")
    fields: list[_Field] = []
    name, value, ended = b"", b"", False

    def begin() -> None:
        if len(fields) == _MAX_FIELDS:
            raise ApiError("bad_request", f"the form has over {_MAX_FIELDS} fields; send images only")
        fields.append(_Field())

    def header_name(data: bytes, start: int, end: int) -> None:
        nonlocal name
        name += data[start:end]

    def header_value(data: bytes, start: int, end: int) -> None:
        nonlocal value
        value += data[start:end]

    def header_end() -> None:
        nonlocal name, value
        if name.lower() == b"content-disposition":
            options = parse_options_header(value)[1]
            fields[-1].name, fields[-1].is_file = options.get(b"name", b""), b"filename" in options
        elif name.lower() == b"content-transfer-encoding":
            fields[-1].encoding = value.strip().lower()
        name = value = b""

    def content(data: bytes, start: int, end: int) -> None:
        part = fields[-1].content
        assert isinstance(part, bytearray)
        part += memoryview(data)[start:end]

    def finish() -> None:
        nonlocal ended
        ended = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": begin,
                "on_header_field": header_name,
                "on_header_value": header_value,
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
    return fields
