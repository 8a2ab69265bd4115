"""Every form in which clients send an image gives the same bytes; everything else is a bad_request."""

from __future__ import annotations

import base64
import collections
import json
import random
import time
import tracemalloc
from urllib.parse import quote, unquote_to_bytes, urlencode

import pytest

from models.images import ImageError
from service import bodies
from service.bodies import many_images, one_image
from service.schemas import MAX_IMAGES, ApiError

# Its base64 has a plus, a slash and padding, so that no form can leave them alone. After the first bytes, any will do.
IMAGE = b"\x89PNG\r\n\x1a\n.\xfb\xef\xbe\xff\xff\xff &=+%. \r\n--x\r\n\x00\xfa"
TEXT = base64.b64encode(IMAGE).decode()
FORM = "multipart/form-data; boundary=x1"


def part(content: bytes, disposition: str = 'form-data; name="image"; filename="cat.jpg"', more: str = "") -> bytes:
    return f"--x1\r\nContent-Disposition: {disposition}\r\n{more}\r\n".encode() + content + b"\r\n"


END = b"--x1--\r\n"


def test_the_subject_has_all_that_makes_base64_difficult() -> None:
    assert {"+", "/", "="} <= set(TEXT)


URLENCODED = "application/x-www-form-urlencoded"
# Everything that clients make of base64.
TEXTS = [
    TEXT,
    TEXT.rstrip("="),
    TEXT.replace("+", "-").replace("/", "_"),
    TEXT.replace("+", "-").replace("/", "_").rstrip("="),
    TEXT.replace("+", " "),
    "\n".join(TEXT[i : i + 16] for i in range(0, len(TEXT), 16)) + "\n",
    "\r\n".join(TEXT[i : i + 5] for i in range(0, len(TEXT), 5)),
    f"  {TEXT}\t\n",
    quote(TEXT, safe=""),
    f"data:image/png;base64,{TEXT}",
    f"data:;base64,{TEXT.rstrip('=')}",
    f"DATA:image/svg+xml;charset=utf-8;BASE64, {TEXT}",
    f"data:image/png;base64,{quote(TEXT, safe='')}",
    quote(f"data:image/png;base64,{TEXT}", safe=""),
    "data:image/png;base64," + "".join(f"%{byte:02x}" for byte in TEXT.encode()),
]


@pytest.mark.parametrize("content_type", ["image/png", "text/plain", "", URLENCODED, "nonsense"])
def test_any_other_content_type_is_the_file_itself(content_type: str) -> None:
    assert one_image(IMAGE, content_type) == IMAGE


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_gives_the_image_from_every_kind_of_base64(text: str, content_type: str) -> None:
    assert one_image(json.dumps({"image": text, "more": 1}).encode(), content_type) == IMAGE


@pytest.mark.parametrize("text", TEXTS)
def test_form_fields_give_the_image_from_every_kind_of_base64(text: str) -> None:
    field = part(text.encode(), 'form-data; name="image"')
    assert one_image(field + END, FORM) == IMAGE
    assert one_image(part(b"5", 'form-data; name="top_k"') + field + END, FORM) == IMAGE
    body = urlencode({"top_k": "5", "image": text})
    assert one_image(body.encode(), URLENCODED) == IMAGE
    assert one_image(body.replace("image=", "x=1&image=").encode(), f"{URLENCODED}; charset=utf-8") == IMAGE
    if "%" not in text and "," not in text and " " not in text:
        assert one_image(f"image={text}".encode(), URLENCODED) == IMAGE  # a plus sign that nobody encoded


@pytest.mark.parametrize("name", ["image", "Image", "images", "images[]"])
def test_the_field_of_a_form_is_known_by_its_name_and_a_lone_one_without(name: str) -> None:
    others = part(b"5", 'form-data; name="top_k"')
    assert one_image(others + part(TEXT.encode(), f'form-data; name="{name}"') + others + END, FORM) == IMAGE
    assert one_image(urlencode({"top_k": 5, name: TEXT}).encode(), URLENCODED) == IMAGE
    assert one_image(urlencode({"photo": TEXT}).encode(), URLENCODED) == IMAGE
    with pytest.raises(ApiError, match="has 0 images"):
        one_image(urlencode({"top_k": 5, "photo": TEXT}).encode(), URLENCODED)


@pytest.mark.parametrize("body", [b"# a = b\n\tc && d", b"a line\nPATH=/bin\n", TEXT.encode() * 5, b"/9j/" + TEXT.encode(), b"{", b"=x"])
def test_what_curl_calls_a_form_and_is_none_is_a_file(body: bytes) -> None:
    assert one_image(body, URLENCODED) == body


def test_the_bytes_of_a_file_may_stand_percent_encoded_in_a_field() -> None:
    assert one_image(urlencode({"image": IMAGE}).encode(), URLENCODED) == IMAGE


def test_percent_encoding_is_undone_as_by_the_standard_library_and_soon() -> None:
    chance = random.Random(5)
    for _ in range(300):
        data = b"".join(chance.choice([b"%", b"%4", b"%41", b"%fF", b"%zz", b"a", b"+"]) for _ in range(chance.randrange(40)))
        assert bodies._unquote(data) == unquote_to_bytes(data)
    long = b"".join(chance.choice([b"%", b"%41", b"abc", b"%2"]) for _ in range(100_000))
    assert bodies._unquote(long) == unquote_to_bytes(long)  # over several pieces
    begun = time.process_time()
    bodies._unquote(b"%" * 5_000_000)
    assert time.process_time() - begun < 0.6  # unquote_to_bytes takes a second and more


def test_a_part_in_base64_by_its_transfer_encoding_is_opened() -> None:
    assert one_image(part(TEXT.encode(), more="Content-Transfer-Encoding: BASE64\r\n") + END, FORM) == IMAGE
    assert one_image(part(IMAGE, more="Content-Transfer-Encoding: binary\r\n") + END, FORM) == IMAGE


def test_a_field_far_over_what_others_allow_is_read() -> None:
    large = IMAGE + random.Random(3).randbytes(6_000_000)
    text = base64.b64encode(large)
    assert one_image(part(text, 'form-data; name="image"') + END, FORM) == large
    assert one_image(b"image=" + text.replace(b"+", b"%2B"), URLENCODED) == large
    assert one_image(b"image=" + b"".join(b"%%%02x" % byte for byte in text[:200_000]), URLENCODED) == base64.b64decode(text[:200_000])


def test_several_images_come_in_their_order_from_forms_and_json() -> None:
    others = [IMAGE + bytes([number]) for number in range(5)]
    texts = [base64.b64encode(one).decode() for one in others]
    files = b"".join(part(one, f'form-data; name="{number}"; filename="a"') for number, one in enumerate(others))
    assert many_images(part(b"5", 'form-data; name="top_k"') + files + END, FORM) == others
    assert many_images(b"".join(part(text.encode(), 'form-data; name="images"') for text in texts) + END, FORM) == others
    assert many_images(urlencode({"images": texts}, doseq=True).encode(), URLENCODED) == others
    assert many_images(json.dumps({"images": texts}).encode(), "application/json") == others
    assert many_images(part(IMAGE) + END, FORM) == [IMAGE]


def test_a_broken_one_among_several_is_an_error_in_its_place() -> None:
    found = many_images(json.dumps({"images": [TEXT, "@@@", TEXT]}).encode(), "application/json")
    assert (found[0], found[2]) == (IMAGE, IMAGE)
    assert isinstance(found[1], ApiError)
    assert (found[1].code, found[1].message.partition(" (")[0]) == ("bad_request", "images.1: not valid base64")
    found = many_images(part(IMAGE) + part(b"") + part(b"no image") + END, FORM)
    assert (found[0], found[2]) == (IMAGE, b"no image")  # which the decoder will refuse
    assert isinstance(found[1], ApiError)


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (b"", FORM, "the body is empty"),
        (IMAGE, "image/png", "/predict takes one file"),
        (IMAGE, URLENCODED, "/predict takes one file"),
        (b'{"image": "QUJD"}', "application/json", "images: Field required"),
        (b'{"images": []}', "application/json", "images: List should have at least 1 item"),
        (b'{"images": "QUJD"}', "application/json", "images: Input should be a valid array"),
        (b'{"images": ["QUJD", 5]}', "application/json", "images.1: Input should be a valid string"),
        (json.dumps({"images": [TEXT] * (MAX_IMAGES + 1)}).encode(), "application/json", f"at most {MAX_IMAGES} items"),
        (part(IMAGE) * (MAX_IMAGES + 1) + END, FORM, f"has {MAX_IMAGES + 1} images; send 1 to {MAX_IMAGES}"),
        (part(b"1", 'form-data; name="a"') + part(b"2", 'form-data; name="b"') + END, FORM, "has 0 images"),
        (part(b"@@@", 'form-data; name="images"') + END, FORM, "images: not valid base64"),
    ],
)
def test_what_holds_no_images_is_a_bad_request_that_says_why(body: bytes, content_type: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        many_images(body, content_type)
    assert caught.value.code == "bad_request"
    assert says in caught.value.message


def test_a_plain_field_that_is_no_image_is_refused_with_the_whole_form() -> None:
    with pytest.raises(ImageError) as caught:
        many_images(part(TEXT.encode(), 'form-data; name="images"') + part(b"AAAA", 'form-data; name="images"') + END, FORM)
    assert caught.value.code == "not_an_image"


@pytest.mark.parametrize(
    "body",
    [
        b'{"images": [' + b'"",' * 6_000_000 + b'""]}',
        b'{"image": ' + b"[" * 3_000_000 + b"]" * 3_000_000 + b"}",
        b'{"image": "' + TEXT.encode() + b'", "more": [' + b"1," * 6_000_000 + b"1]}",
    ],
)
def test_json_of_millions_of_values_is_refused_before_they_become_objects(body: bytes) -> None:
    for read in (one_image, many_images):
        tracemalloc.start()
        with pytest.raises(ApiError, match="over 100000 values"):
            read(body, "application/json")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


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
        assert one_image(part(IMAGE, disposition) + END, f"multipart/form-data; boundary={boundary}") == IMAGE


def test_other_fields_beside_the_file_do_not_matter() -> None:
    before = part(b"5", 'form-data; name="top_k"')
    after = part(b"x" * 100_000, 'form-data; name="comment"')
    assert one_image(before + part(IMAGE, more="Content-Type: image/jpeg\r\n") + after + END, FORM) == IMAGE


def test_a_preamble_an_epilogue_and_headers_in_any_case_do_not_matter() -> None:
    body = b'\r\n--x1\r\ncontent-TYPE: image/png\r\ncontent-disposition: form-data; name="f"; FILENAME="a"\r\n\r\n' + IMAGE + b"\r\n"
    body += part(b"5", 'form-data; name="top_k"') + END + b"\r\n"
    assert one_image(body, "Multipart/Form-Data; charset=utf-8; Boundary=x1") == IMAGE


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (b"", "image/jpeg", "the body is empty"),
        (b"", "application/json", "the body is empty"),
        (b"", FORM, "the body is empty"),
        (b"{", "application/json", "the body: Invalid JSON"),
        (b'{"image": "\xff"}', "application/json", "the body: Invalid JSON"),
        (b"[" * 90_000, "application/json", "the body: Invalid JSON"),
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
        (b'{"image": "https://example.com/cat.jpg"}', "application/json", "image: addresses are not fetched"),
        (part(b"hello", 'form-data; name="image"') + END, FORM, "nor an image file; with curl, a file is sent by image=@photo.jpg"),
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
        (part(IMAGE) + part(IMAGE) + END, FORM, "has 2 images; send exactly one"),
        (part(b"1", 'form-data; name="a"') + part(b"2", 'form-data; name="b"') + END, FORM, "has 0 images"),
        (part(b"") + END, FORM, "image: the file is empty"),
        (part(b"") + part(IMAGE, 'form-data; name="image"') + END, FORM, "image: the file is empty"),
    ],
)
def test_what_holds_no_image_is_a_bad_request_that_says_why(body: bytes, content_type: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        one_image(body, content_type)
    assert (caught.value.code, caught.value.status) == ("bad_request", 400)
    assert says in caught.value.message
    assert len(caught.value.message) < 300


def test_a_body_without_parts_is_a_bad_request() -> None:
    for body in (END, b"\r\n" + END):
        with pytest.raises(ApiError) as caught:
            one_image(body, FORM)
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
            found = one_image(bytes(body), content_type)
            outcomes["bytes" if type(found) is bytes and found else f"{found!r}"] += 1
        except ApiError as error:
            outcomes[error.code] += 1
    assert outcomes.keys() == {"bytes", "bad_request"}
    assert min(outcomes.values()) > 500


def test_more_parts_than_any_form_has_are_refused_early() -> None:
    with pytest.raises(ApiError, match=f"over {MAX_IMAGES + 100} fields"):
        one_image(part(b"", 'form-data; name="a"') * 100_000 + END, FORM)
    with pytest.raises(ApiError, match=f"over {MAX_IMAGES + 100} fields"):
        one_image(b"a=&" * 100_000, URLENCODED)
