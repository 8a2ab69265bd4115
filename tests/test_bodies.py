"""Every form in which clients send an image gives the same bytes; everything else is a bad_request."""

from __future__ import annotations

import base64
import collections
import json
import random

import pytest

from service.bodies import image_bytes
from service.schemas import ApiError

# Its base64 has a plus, a slash and padding, so that no form can leave them alone.
IMAGE = b"\x89PNG\r\n\xfb\xef\xbe\xff\xff\xff any bytes will do: \r\n--x\r\n\x00\xfa"
TEXT = base64.b64encode(IMAGE).decode()
FORM = "multipart/form-data; boundary=x1"


def part(content: bytes, disposition: str = 'form-data; name="image"; filename="cat.jpg"', more: str = "") -> bytes:
    return f"--x1\r\nContent-Disposition: {disposition}\r\n{more}\r\n".encode() + content + b"\r\n"


END = b"--x1--\r\n"


def test_the_subject_has_all_that_makes_base64_difficult() -> None:
    assert {"+", "/", "="} <= set(TEXT)


@pytest.mark.parametrize("content_type", ["image/png", "text/plain", "", "application/x-www-form-urlencoded", "nonsense"])
def test_any_other_content_type_is_the_file_itself(content_type: str) -> None:
    assert image_bytes(IMAGE, content_type) == IMAGE


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.rstrip("="),
        TEXT.replace("+", "-").replace("/", "_"),
        TEXT.replace("+", "-").replace("/", "_").rstrip("="),
        TEXT.replace("+", " "),
        "\n".join(TEXT[i : i + 16] for i in range(0, len(TEXT), 16)) + "\n",
        "\r\n".join(TEXT[i : i + 5] for i in range(0, len(TEXT), 5)),
        f"  {TEXT}\t\n",
        f"data:image/png;base64,{TEXT}",
        f"data:;base64,{TEXT.rstrip('=')}",
        f"DATA:image/svg+xml;charset=utf-8;BASE64, {TEXT}",
    ],
)
@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_gives_the_image_from_every_kind_of_base64(text: str, content_type: str) -> None:
    assert image_bytes(json.dumps({"image": text, "more": 1}).encode(), content_type) == IMAGE


@pytest.mark.parametrize(
    "disposition",
    [
        'form-data; name="image"; filename="cat.jpg"',
        'form-data; name="file"; filename="a \\"quoted\\"; name.jpg"',
        'form-data; name="anything at all"; filename="猫.jpg"',
        "form-data; name=image; filename*=UTF-8''%E7%8C%AB.jpg",
        'form-data; name="image"; filename=""',
        'form-data; filename="cat.jpg"',
        'form-data; name="image"',  # a plain field, alone
    ],
)
def test_multipart_gives_the_one_file_under_any_name(disposition: str) -> None:
    for boundary in ("x1", '"x1"'):
        assert image_bytes(part(IMAGE, disposition) + END, f"multipart/form-data; boundary={boundary}") == IMAGE


def test_other_fields_beside_the_file_do_not_matter() -> None:
    before = part(b"5", 'form-data; name="top_k"')
    after = part(b"x" * 100_000, 'form-data; name="comment"')
    assert image_bytes(before + part(IMAGE, more="Content-Type: image/jpeg\r\n") + after + END, FORM) == IMAGE


def test_a_preamble_an_epilogue_and_headers_in_any_case_do_not_matter() -> None:
    body = b'\r\n--x1\r\ncontent-TYPE: image/png\r\ncontent-disposition: form-data; name="f"; FILENAME="a"\r\n\r\n' + IMAGE + b"\r\n"
    body += part(b"5", 'form-data; name="top_k"') + END + b"\r\n"
    assert image_bytes(body, "Multipart/Form-Data; charset=utf-8; Boundary=x1") == IMAGE


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (b"", "image/jpeg", "the body is empty"),
        (b"", "application/json", "the body is empty"),
        (b"", FORM, "the body is empty"),
        (b"{", "application/json", "the body: Invalid JSON"),
        (b'{"image": "\xff"}', "application/json", "the body: Invalid JSON"),
        (b"[" * 200_000, "application/json", "the body: Invalid JSON"),
        (b"[]", "application/json", "the body: Input should be an object"),
        (b'{"picture": "QUJD"}', "application/json", "image: Field required"),
        (b'{"image": null}', "application/json", "image: Input should be a valid string"),
        (b'{"image": ["QUJD"]}', "application/json", "image: Input should be a valid string"),
        (b'{"image": ""}', "application/json", "image: empty"),
        (b'{"image": " = "}', "application/json", "image: empty"),
        (b'{"image": "data:image/png;base64,"}', "application/json", "image: empty"),
        (b'{"image": "QUJ$"}', "application/json", "image: not valid base64"),
        (b'{"image": "QUJDR"}', "application/json", "image: not valid base64"),
        (b'{"image": "QU=JD"}', "application/json", "image: not valid base64"),
        ('{"image": "QUJDé"}'.encode(), "application/json", "image: not valid base64"),
        (b'{"image": "https://example.com/cat.jpg"}', "application/json", "image: not valid base64"),
        (b'{"image": "data:image/png,QUJD"}', "application/json", "image: a data URI must have the form"),
        (b'{"image": "data:image/png;base64"}', "application/json", "image: a data URI must have the form"),
        (part(IMAGE) + END, "multipart/form-data", "names no boundary"),
        (part(IMAGE) + END, 'multipart/form-data; boundary=""', "names no boundary"),
        (part(IMAGE) + END, "multipart/form-data; boundary=x2", "malformed"),
        (part(IMAGE) + END, f"multipart/form-data; boundary={'x' * 300}", "malformed"),
        (IMAGE, FORM, "malformed"),
        (part(IMAGE), FORM, "ends before its last boundary"),
        ((part(IMAGE) + END)[:-5], FORM, "ends before its last boundary"),
        (part(IMAGE)[:60], FORM, "ends before its last boundary"),
        (part(IMAGE) + part(IMAGE) + END, FORM, "has 2 files; send exactly one"),
        (part(b"1", 'form-data; name="a"') + part(b"2", 'form-data; name="b"') + END, FORM, "has 2 files"),
        (part(b"") + END, FORM, "the file in the multipart body is empty"),
        (part(b"") + part(IMAGE, 'form-data; name="image"') + END, FORM, "the file in the multipart body is empty"),
    ],
)
def test_what_holds_no_image_is_a_bad_request_that_says_why(body: bytes, content_type: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        image_bytes(body, content_type)
    assert (caught.value.code, caught.value.status) == ("bad_request", 400)
    assert says in caught.value.message
    assert len(caught.value.message) < 300


def test_a_body_without_parts_is_a_bad_request() -> None:
    for body in (END, b"\r\n" + END):
        with pytest.raises(ApiError) as caught:
            image_bytes(body, FORM)
        assert caught.value.code == "bad_request"


def test_random_bodies_give_bytes_or_a_bad_request_and_nothing_else() -> None:
    source = random.Random(7)
    seeds = [json.dumps({"image": TEXT}).encode(), part(IMAGE, more="Content-Type: image/png\r\n") + END, IMAGE]
    pieces = [b"\r\n", b"--x1", b'"', b"{", b"\\ud800", b"; filename*=utf-8''%ff", b"=?utf-8?q?x?=", b"\x00", b"=", b"--"]
    types = ["application/json", FORM, "multipart/form-data", "multipart/x; boundary*=utf-16''%ff", 'multipart/x; boundary="', "image/png"]
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(5000):
        body = bytearray(source.choice(seeds))
        for _ in range(source.randrange(5)):
            at = source.randrange(len(body) + 1)
            body[at : at + source.randrange(4)] = source.choice([*pieces, source.randbytes(3)])
        content_type = source.choice(types) if source.random() < 0.9 else "multipart/" + source.randbytes(20).decode("latin-1")
        try:
            found = image_bytes(bytes(body), content_type)
            outcomes["bytes" if type(found) is bytes and found else f"{found!r}"] += 1
        except ApiError as error:
            outcomes[error.code] += 1
    assert outcomes.keys() == {"bytes", "bad_request"}
    assert min(outcomes.values()) > 500


def test_more_parts_than_any_form_has_are_refused_early() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
    with pytest.raises(ApiError, match="over 100 parts"):
        image_bytes(part * 100_000 + b"--b--\r\n", "multipart/form-data; boundary=b")
