"""What every input gives: the table of image rules, each with its value. Subjects are made here, most from a photograph in examples/."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageChops, ImageCms, JpegImagePlugin

from models import images
from models.images import FORMATS, ImageError, decode

ROOT = Path(__file__).parent.parent
SAVED: dict[str, dict[str, Any]] = {  # how to save each format so that little is lost
    "JPEG": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True},
    "GIF": {},
    "BMP": {},
    "TIFF": {},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
}
TURNS = (None, None, *(Image.Transpose(turn) for turn in (0, 3, 1, 5, 4, 6, 2)))  # by EXIF orientation


def photo(size: tuple[int, int] = (96, 64)) -> Image.Image:
    with Image.open(ROOT / "examples" / "cat.jpg") as image:
        return image.convert("RGB").resize(size)


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **{**SAVED[kind], **options})
    return file.getvalue()


def array(image: Image.Image) -> npt.NDArray[np.int16]:
    return np.asarray(image, np.int16)


def difference(found: Image.Image, wanted: Image.Image) -> float:
    assert found.mode == "RGB"
    assert found.size == wanted.size
    return float(np.abs(array(found) - array(wanted)).mean())


def refused(data: bytes, **options: Any) -> ImageError:
    with pytest.raises(ImageError) as raised:
        decode(data, **options)
    return raised.value


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, bits: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG written by hand, for what Pillow does not write: `rows` hold a filter byte before each row."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff(*tags: tuple[int, int, int, int], body: bytes = b"") -> bytes:
    """A TIFF written by hand, of (tag, type, count, value); `body` begins at byte 14 + 12 per tag."""
    entries = b"".join(struct.pack("<HHLL", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4) + body


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    """A WebP written by hand."""
    body = b"WEBP" + b"".join(name + struct.pack("<I", len(part)) + part + bytes(len(part) & 1) for name, part in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def segment(code: int, body: bytes) -> bytes:
    """A part of a JPEG."""
    return struct.pack(">BBH", 0xFF, code, len(body) + 2) + body


def profile(space: bytes, *, primaries: str = "srgb", gamma: float | None = None) -> bytes:
    """An ICC profile written by hand: sRGB's or Display P3's primaries (D50), sRGB's curve or a power."""
    xyz = {
        "srgb": ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.7141)),
        "p3": ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.0666, 0.78407)),
    }[primaries]

    def fixed(*values: float) -> bytes:
        return b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    curve = b"para\0\0\0\0\0\3\0\0" + fixed(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    if gamma is not None:
        curve = b"curv\0\0\0\0\0\0\0\1" + struct.pack(">H", round(gamma * 256)) + b"\0\0"
    tags = {b"wtpt": b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249), b"cprt": b"text\0\0\0\0none"}
    if space == b"GRAY":
        tags[b"kTRC"] = curve
    else:
        for letter, point in zip((b"r", b"g", b"b"), xyz, strict=True):
            tags |= {letter + b"XYZ": b"XYZ \0\0\0\0" + fixed(*point), letter + b"TRC": curve}
    at, table, body = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", at + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    head = struct.pack(">I4sI4s4s4s12s4s", at + len(body), b"lcms", 0x02400000, b"mntr", space, b"XYZ ", b"", b"acsp")
    return (head + bytes(28) + fixed(0.9642, 1, 0.8249)).ljust(128, b"\0") + table + body


# Formats


@pytest.mark.parametrize("kind", SAVED)
def test_every_format_gives_its_picture_as_rgb(kind: str) -> None:
    assert kind in {name.upper() for name in FORMATS}
    assert difference(decode(save(photo(), kind)), photo()) < (8 if kind == "GIF" else 2)  # a GIF has 256 colours


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "LAB", "I", "F"])
def test_every_mode_of_tiff_gives_its_tones(mode: str) -> None:
    grey = mode in ("1", "L", "LA", "I", "F")
    image = photo().convert("L").convert(mode) if grey else photo().convert(mode)
    found, wanted = array(decode(save(image, "TIFF"))), array(photo().convert("L").convert("RGB") if grey else photo())
    assert np.abs(found.mean((0, 1)) - wanted.mean((0, 1))).max() < 3  # of the whole: 1 and P are dithered


def test_premultiplied_alpha_is_divided_out() -> None:
    tags = ((256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 4, 122), (262, 3, 1, 2), (273, 4, 1, 130), (277, 3, 1, 4), (278, 3, 1, 8))
    data = tiff(*tags, (284, 3, 1, 1), (338, 3, 1, 1), body=struct.pack("<4H", 8, 8, 8, 8) + bytes((60, 60, 0, 128)) * 64)
    assert decode(data).getpixel((4, 4)) == (187, 187, 127)  # 60 of 128 is 120 of 255; that, half on white


def test_the_bytes_decide_and_names_of_foreign_formats_are_told() -> None:
    foreign = {
        "PDF": b"%PDF-1.7\n",
        "SVG": b"\xef\xbb\xbf\n<svg xmlns='http://www.w3.org/2000/svg'/>",
        "XML": b"<?xml version='1.0'?><svg/>",
        "Photoshop": b"8BPS\0\1" + bytes(20),
        "ICO": b"\0\0\1\0\1\0" + bytes(20),
        "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
        "JPEG XL": b"\xff\n" + bytes(20),
        "QuickTime": b"\0\0\0\x14ftypqt  \0\0\0\0qt  ",
        "MP4": b"\0\0\0\x18ftypisom\0\0\2\0isommp42",
        "WebM": b"\x1aE\xdf\xa3" + bytes(20),
        "gzip": b"\x1f\x8b\x08" + bytes(20),
        "zip": b"PK\3\4" + bytes(20),
        "PNM": b"P6\n2 2\n255\n" + bytes(12),
        "OpenEXR": b"v/1\1" + bytes(20),
        "Radiance": b"#?RADIANCE\n",
        "DICOM": bytes(128) + b"DICM",
        "FITS": b"SIMPLE  =                    T",
    }
    for name, data in foreign.items():
        error = refused(data)
        assert error.code == "unsupported_format"
        assert name in str(error)
        assert all(supported in str(error) for supported in FORMATS)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"BM", b"BM, the letters, begin this text", b"<html></html>", b'{"a": 1}', bytes(99)])
def test_what_is_no_image_is_called_so(data: bytes) -> None:
    assert refused(data).code == "not_an_image"


def test_heic_without_its_library_is_named_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for brand in (b"heic", b"mif1"):
        error = refused(b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1heic" + bytes(99))
        assert error.code == "unsupported_format"
        assert "HEIC" in str(error)
        assert "pip install pillow-heif" in str(error)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animated_files_give_their_first_frame(kind: str) -> None:
    first, second = Image.new("RGB", (20, 20), (200, 30, 30)), Image.new("RGB", (20, 20), (30, 200, 30))
    data = save(first, kind, save_all=True, append_images=[second], duration=50)
    assert decode(data).getpixel((5, 5)) == (200, 30, 30)


def test_a_gif_frame_smaller_than_the_screen_leaves_the_background() -> None:
    data = bytearray(save(Image.new("P", (8, 8), 0), "GIF"))
    data[6:10] = struct.pack("<HH", 16, 8)
    image = decode(bytes(data), background=(1, 2, 3))
    assert image.size == (16, 8)
    assert image.getpixel((12, 4)) == (1, 2, 3)


# Whole or not at all


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_file_cut_short_is_corrupt(kind: str, kept: float) -> None:
    data = save(photo(), kind)
    assert refused(data[: int(len(data) * kept)]).code == "image_corrupt"


@pytest.mark.parametrize("kind", sorted({*SAVED} - {"PNG"}))  # whose last 12 bytes hold nothing
def test_a_file_without_its_last_bytes_is_corrupt(kind: str) -> None:
    assert refused(save(photo(), kind)[:-10]).code == "image_corrupt"


@pytest.mark.parametrize("options", [{"progressive": True}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}])
def test_other_codings_cut_short_are_corrupt(options: dict[str, Any]) -> None:
    data = save(photo(), "JPEG" if "progressive" in options else "TIFF", **options)
    for cut in (len(data) // 2, len(data) * 9 // 10, len(data) - 10):
        assert refused(data[:cut]).code == "image_corrupt"


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_a_large_jpeg_is_read_at_once_and_nothing_of_it_may_be_missing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data, reads, read = save(photo((640, 480)), "JPEG", **options), list[int](), JpegImagePlugin.JpegImageFile.load_read

    def counted(image: JpegImagePlugin.JpegImageFile, size: int) -> bytes:
        reads.append(size)
        return read(image, size)

    with Image.open(io.BytesIO(data)) as image:
        wanted = image.convert("RGB")  # Pillow reads 64 KB at a time
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load_read", counted)
    assert difference(decode(data), wanted) == 0
    assert len(reads) == 1
    assert len(data) > 100_000
    for kept in (65_536, 65_537, len(data) * 9 // 10, *range(len(data) - 5, len(data))):
        for side in (None, 120, 60, 30):
            assert refused(data[:kept], side=side).code == "image_corrupt"


def test_a_tiff_whose_strips_are_missing_is_corrupt() -> None:
    tags = ((256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 98), (277, 3, 1, 1), (278, 3, 1, 2))
    assert refused(tiff(*tags, body=bytes(64))).code == "image_corrupt"


def test_nothing_but_image_errors_comes_out_of_broken_files() -> None:
    chance, codes = random.Random(0), set()
    whole = [save(photo((40, 30)), kind) for kind in SAVED]
    whole += [save(photo((40, 30)).convert(mode), "TIFF") for mode in ("1", "LA", "P", "CMYK", "F")]
    whole += [save(photo((40, 30)).convert("RGBA"), "PNG"), save(photo((40, 30)).convert("P"), "BMP")]
    for data in whole:
        for _ in range(60):
            broken = bytearray(data[: chance.choice((len(data), chance.randrange(len(data))))])
            for _ in range(chance.randrange(5) if broken else 0):
                broken[chance.randrange(min(len(broken), chance.choice((64, 1 << 30))))] = chance.randrange(256)
            try:
                assert decode(bytes(broken), side=8, max_pixels=1_000_000).mode == "RGB"
            except ImageError as error:
                codes.add(error.code)
    for data in whole:
        for _ in range(20):
            codes.add(refused(data[: chance.randrange(3, 24)] + chance.randbytes(50), max_pixels=1_000_000).code)
    assert codes <= {"not_an_image", "unsupported_format", "image_too_large", "image_corrupt"}


def test_needless_metadata_may_be_broken() -> None:
    jpeg, png_ = save(photo(), "JPEG"), save(photo(), "PNG")
    segments = b"\xff\xe1\0\x08Exif\0\0" + b"\xff\xe2\0\x06MPF\0" + b"\xff\xed\0\x14Photoshop 3.0\x008BIM" + b"\xff\xe0\0\x07JFIF\0"
    assert decode(jpeg[:2] + segments + jpeg[2:]) == decode(jpeg)
    chunks = chunk(b"eXIf", b"MM") + chunk(b"acTL", bytes(8)) + chunk(b"tEXt", b"no key") + chunk(b"iCCP", b"x") + chunk(b"gAMA", b"")
    assert decode(png_[:33] + chunks + png_[33:]) == decode(png_)


# Limits


def patched(data: bytes, at: int, layout: str, *values: int) -> bytes:
    return data[:at] + struct.pack(layout, *values) + data[at + struct.calcsize(layout) :]


def bomb(kind: str) -> bytes:
    """A few bytes that declare a huge picture."""
    data = save(Image.new("P" if "GIF" in kind else "RGB", (16, 16)), kind.split()[0])
    match kind:
        case "JPEG":
            return patched(data, data.index(b"\xff\xc0") + 5, ">HH", 65000, 65000)
        case "PNG":
            return png(64250, 64250, 8, 2, bytes(5_000_000))
        case "WEBP":
            return patched(data, 21, "<I", 16382 | 16382 << 14)
        case "GIF":  # on opening, a frame that will be disposed of gets a canvas
            frame = data.rindex(b",\0\0\0\0\x10\0\x10\0")
            return data[:frame] + b"!\xf9\4\x08\0\0\0\0" + patched(data, frame + 5, "<HH", 65535, 65535)[frame:]
        case "BMP":
            return patched(data, 18, "<ii", 60000, 60000)
        case "AVIF":
            return patched(data, data.index(b"ispe") + 8, ">II", 60000, 60000)
        case "WEBP canvas":
            return riff(vp8x(2, 16384, 16384), (b"ANIM", bytes(6)), (b"ANMF", bytes(99)))
        case "GIF canvas":
            return patched(data, 6, "<HH", 60000, 60000)
    tags = ((258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (322, 4, 1, 60000), (323, 4, 1, 60000), (324, 4, 1, 150), (325, 4, 1, 9))
    return tiff((256, 3, 1, 8), (257, 3, 1, 8), *tags, body=bytes(999))  # the tile is huge, the picture is not


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "WEBP canvas", "GIF", "GIF canvas", "BMP", "TIFF", "AVIF"])
def test_a_huge_picture_is_refused_from_its_header(kind: str) -> None:
    data, before, start = bomb(kind), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    error = refused(data)
    assert error.code == "image_too_large"
    assert "100 megapixels" in str(error)
    assert time.perf_counter() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def test_the_limit_is_the_callers_and_pillows_own_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    png_, avif = save(photo((30, 20)), "PNG"), save(photo((30, 20)), "AVIF")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode(png_, max_pixels=600).size == (30, 20)
    assert refused(avif, max_pixels=599).code == "image_too_large"


def test_metadata_bombs_cost_little() -> None:
    jpeg, png_, gif = (save(photo(), kind) for kind in ("JPEG", "PNG", "GIF"))
    text = chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(1_000_000)))
    start = time.perf_counter()
    assert decode(png_[:33] + text * 2000 + png_[33:]).size == (96, 64)  # 2 GB of text
    assert refused(png_[:33] + chunk(b"IDAT", b"") * 500_000 + png_[33:]).code == "image_corrupt"
    assert refused(jpeg[:2] + b"\xff\xe1\0\x09Exif\0\0x" * 500_000 + jpeg[2:]).code == "image_corrupt"
    assert refused(gif[:6] + bytes(7) + b"!\xfe" + b"\1x" * 2_000_000 + b"\0").code == "image_corrupt"
    tags = ((256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 2_000_000, 98), (277, 3, 1, 1), (278, 3, 1, 1))
    assert refused(tiff(*tags, body=bytes(8_000_000))).code == "image_corrupt"
    assert time.perf_counter() - start < 10


def frame(data: bytes) -> int:
    """Where the frame header of a JPEG begins."""
    return data.index(b"\xff\xc0")


def gif_frame(data: bytes) -> int:
    return data.index(b",\0\0\0\0\x60\0\x40\0")


SMALL = {kind: save(photo(), kind) for kind in SAVED}
SQUARE = ((256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 122), (277, 3, 1, 1), (278, 4, 1, 8))
MANY = bytes(range(256)) * 3800  # about a megabyte
VP8 = save(photo(), "WEBP", lossless=False)[20:]


def vp8x(flags: int, width: int, height: int) -> tuple[bytes, bytes]:
    return b"VP8X", struct.pack("<I", flags) + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        # no pixels
        (lambda j, p, g, b: patched(j, frame(j) + 5, ">H", 0), "96 x 0 pixels"),  # its height would come later (DNL)
        (lambda j, p, g, b: patched(j, frame(j) + 7, ">H", 0), "0 x 64 pixels"),
        (lambda j, p, g, b: png(0, 5, 8, 2, b""), "0 x 5 pixels"),
        (lambda j, p, g, b: png(5, 0, 8, 2, b""), "5 x 0 pixels"),
        (lambda j, p, g, b: patched(riff((b"VP8 ", VP8)), 26, "<HH", 0, 9), "0 x 9 pixels"),
        (lambda j, p, g, b: patched(g, gif_frame(g) + 5, "<HH", 0, 7), "0 x 7 pixels"),
        (lambda j, p, g, b: patched(b, 18, "<ii", 0, 5), "0 x 5 pixels"),
        (lambda j, p, g, b: patched(b, 22, "<i", 0), "96 x 0 pixels"),
        (lambda j, p, g, b: patched(b, 18, "<i", -5), "-5 x 64 pixels"),
        (lambda j, p, g, b: tiff((256, 4, 1, 0), *SQUARE[1:], body=bytes(99)), "0 x 8 pixels"),
        (lambda j, p, g, b: tiff(*SQUARE[:5], (322, 4, 1, 0), (323, 4, 1, 16), body=bytes(99)), "0 x 16 pixels"),
        (lambda j, p, g, b: patched(SMALL["AVIF"], SMALL["AVIF"].index(b"ispe") + 8, ">II", 0, 0), "0 x 0 pixels"),
        # cut short
        (lambda j, p, g, b: j[: len(j) // 2], "The JPEG is cut short"),
        (lambda j, p, g, b: j[:4], "The JPEG is cut short"),
        (lambda j, p, g, b: j[:-2], "The JPEG is cut short"),
        (lambda j, p, g, b: p[: len(p) // 2], "The PNG is cut short"),
        (lambda j, p, g, b: g[: len(g) // 2], "The GIF is cut short"),
        (lambda j, p, g, b: b[: len(b) // 2], "The BMP is cut short"),
        (lambda j, p, g, b: patched(b, 10, "<I", 1 << 31), "The BMP is cut short"),
        (lambda j, p, g, b: patched(SMALL["TIFF"], 4, "<L", 1 << 31), "The TIFF is cut short"),
        (lambda j, p, g, b: tiff((256, 4, 1, 9), (257, 4, 1, 99), *SQUARE[2:], body=bytes(99)), "strips or tiles are missing"),
        # broken inside
        (lambda j, p, g, b: p[:-20] + b"x" + p[-19:], "The PNG is broken"),
        (lambda j, p, g, b: p[:33] + chunk(b"IEND", b""), "The PNG is broken"),
        (lambda j, p, g, b: j[:2] + patched(j[frame(j) : frame(j) + 19], 5, ">HH", 900, 900) + j[2:], "The JPEG is broken"),
        (lambda j, p, g, b: riff(vp8x(2, 9, 9), (b"ANIM", bytes(6))), "The WebP is broken"),
        (lambda j, p, g, b: riff(vp8x(0, 9, 9), (b"VP8 ", VP8)), "The WebP is broken"),  # a canvas of another size
        # too many parts
        (lambda j, p, g, b: j[:2] + segment(0xFE, b"") * 1_000_000 + j[2:], "over 4096 segments"),
        (lambda j, p, g, b: j[:2] + segment(0xDB, b"\0" + b"\1" * 64) * 5000 + j[2:], "over 4096 segments"),
        (lambda j, p, g, b: p[:33] + chunk(b"abCd", b"") * 1_000_000 + p[33:], "over 100000 chunks"),
        (lambda j, p, g, b: g[:6] + bytes(7) + b"!\xfe" + b"\1x" * 2_000_000 + b"\0", "over 100000 blocks"),
        (lambda j, p, g, b: tiff(*SQUARE[:5], (273, 4, 2_000_000, 98), body=bytes(8_000_000)), "over 100000 values"),
    ],
)
def test_a_refusal_names_its_reason_and_is_quick(make: Callable[..., bytes], reason: str) -> None:
    data = make(*(SMALL[kind] for kind in ("JPEG", "PNG", "GIF", "BMP")))
    start = time.thread_time()
    error = refused(data)
    assert time.thread_time() - start < 1
    assert error.code == "image_corrupt"
    assert reason in str(error)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (patched(SMALL["JPEG"], frame(SMALL["JPEG"]) + 4, "B", 12), "JPEG of 12 bits"),
        (SMALL["JPEG"].replace(b"\xff\xc0", b"\xff\xc5", 1), "SOF5"),  # hierarchical
        (SMALL["JPEG"].replace(b"\xff\xc0", b"\xff\xcb", 1), "SOF11"),  # lossless and arithmetic
        (SMALL["PNG"][:8] + chunk(b"CgBI", bytes(4)) + SMALL["PNG"][8:], "Apple's own form of PNG"),
        (tiff(*SQUARE[:6], (277, 3, 1, 1000), body=bytes(999)), "1000 samples a pixel"),
        (tiff(*SQUARE[:3], (259, 3, 1, 9), *SQUARE[4:], body=bytes(999)), "compression 9"),
        (b"\0\0\1\0\1\0" + bytes(12) + struct.pack("<I", 22) + SMALL["PNG"], "Windows icon"),  # with a PNG inside
        (b"PK\3\4" + bytes(99) + SMALL["JPEG"], "zip archive"),
        (b"%PDF-1.4\n" + SMALL["JPEG"], "PDF"),
    ],
)
def test_what_is_not_decoded_is_named(data: bytes, reason: str) -> None:
    error = refused(data)
    assert error.code == "unsupported_format"
    assert reason in str(error)


def test_what_is_wrong_with_a_tiff_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    number = struct.pack("<HHLHH", 277, 8, 1, 1000, 0)  # of a type in which we don't look for it
    data = tiff(*SQUARE, body=bytes(999)).replace(struct.pack("<HHLL", 277, 3, 1, 1), number)
    assert refused(data).code == "image_corrupt"
    assert caplog.records == []


@pytest.mark.parametrize(
    "make",
    [
        lambda j, p, g: j + bytes(15_000_000),
        lambda j, p, g: j + save(photo((300, 200)), "JPEG"),
        lambda j, p, g: j + b"PK\3\4" + bytes(99),
        lambda j, p, g: g + b"<html><script>alert(1)</script></html>",
        lambda j, p, g: p + b"%PDF-1.4\n",
        lambda j, p, g: j[:-1] + b"\xd0",  # another end
        lambda j, p, g: j[:-2] + b"\xff\xd0" * 7_500_000 + j[-2:],  # restart markers
        lambda j, p, g: j[:2] + b"\xff" * 15_000_000 + j[2:],
        lambda j, p, g: j[:2] + segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 228 + j[2:],
        lambda j, p, g: j[:2] + b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes((n + 1, 228)) + MANY[:65_000]) for n in range(228)) + j[2:],
        lambda j, p, g: p[:33] + chunk(b"tEXt", b"k\0" + MANY * 15) + p[33:],
        lambda j, p, g: p[:33] + chunk(b"eXIf", b"MM\0*" + bytes(15_000_000)) + p[33:],
        lambda j, p, g: p[:33] + chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(4_000_000))) * 3000 + p[33:],  # 12 GB of profiles
        lambda j, p, g: p[:33] + chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(4_000_000))[:-9] + bytes(9)) * 3000 + p[33:],  # broken
        lambda j, p, g: p[:33] + chunk(b"PLTE", bytes(768)) * 9000 + p[33:],
        lambda j, p, g: g[:781] + b"!\xfe" + (b"\xff" + bytes(255)) * 50_000 + b"\0" + g[781:],
        lambda j, p, g: riff(vp8x(8, 96, 64), (b"VP8 ", VP8), (b"EXIF", MANY * 15)),
        lambda j, p, g: riff(vp8x(32, 96, 64), (b"ICCP", MANY * 15), (b"VP8 ", VP8)),
        lambda j, p, g: riff(vp8x(4, 96, 64), (b"VP8 ", VP8), (b"XMP ", MANY * 15)),
        lambda j, p, g: riff(vp8x(0, 96, 64), (b"VP8 ", VP8), *[(b"abcd", b"")] * 1_000_000),
        lambda j, p, g: SMALL["AVIF"] + struct.pack(">I4s", 15_000_008, b"free") + bytes(15_000_000),
    ],
)
def test_what_lies_around_a_picture_costs_little(make: Callable[..., bytes]) -> None:
    """Metadata by the megabyte, other files behind it: it decodes, within a second and 50 MB."""
    data = make(SMALL["JPEG"], SMALL["PNG"], SMALL["GIF"])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    assert decode(data).size == (96, 64)
    assert time.thread_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_of_thousands_of_frames_only_the_first_costs(kind: str) -> None:
    count = {"TIFF": 1000, "AVIF": 100}.get(kind, 5000)  # these are slow to write
    frames = [Image.new("RGB", (8, 8), (250, number & 255, number >> 8)) for number in range(count)]
    data, start = save(frames[0], kind, save_all=True, append_images=frames[1:]), time.thread_time()
    assert array(decode(data))[4, 4] == pytest.approx([250, 0, 0], abs=3)
    assert time.thread_time() - start < 0.2


def test_tiff_directories_that_loop_are_not_followed() -> None:
    tags = (*SQUARE, (330, 4, 1, 8), (34665, 4, 1, 8))  # SubIFDs and EXIF that are the directory itself
    data = tiff(*tags, body=bytes((200,)) * 99)
    data = patched(data, 10 + 12 * 5 + 8, "<L", len(data) - 99)  # the strip
    assert decode(patched(data, 10 + 12 * len(tags), "<L", 8)).getpixel((4, 4)) == (200, 200, 200)  # the next directory, too


def test_an_inflated_strip_gives_no_more_than_its_picture() -> None:
    packed = zlib.compress(bytes((200,)) * 100_000_000)
    data = tiff(*SQUARE[:3], (259, 3, 1, 8), *SQUARE[4:], (279, 4, 1, len(packed)), body=packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode(data).getpixel((4, 4)) == (200, 200, 200)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_lossless_jpeg_is_decoded() -> None:
    values = np.asarray(photo((24, 16)).convert("L")).astype(int)
    before = np.hstack([np.vstack([[[128]], values[:-1, :1]]), values[:, :-1]])  # what each value is predicted by
    bits = ""
    for change in (values - before).flat:
        size = abs(int(change)).bit_length()
        bits += f"{size:04b}" + (f"{change if change > 0 else change + (1 << size) - 1:0{size}b}" if size else "")
    bits += "1" * (-len(bits) % 8)
    packed = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    table = b"\0" + bytes((0, 0, 0, 9, *[0] * 12, *range(9)))  # nine codes of four bits
    parts = segment(0xC3, struct.pack(">BHHB", 8, 16, 24, 1) + b"\1\x11\0") + segment(0xC4, table) + segment(0xDA, b"\1\1\0\1\0\0")
    assert (array(decode(b"\xff\xd8" + parts + packed + b"\xff\xd9"))[:, :, 0] == values).all()


def test_large_pictures_take_turns_and_small_ones_do_not_wait() -> None:
    large = png(6000, 6000, 1, 0, bytes(6000 * 751))
    with ThreadPoolExecutor(2) as pool:
        with images._LARGE_TURN:
            waiting, passing = pool.submit(decode, large), pool.submit(decode, SMALL["PNG"])
            assert passing.result(30).size == (96, 64)
            assert wait([waiting], 0.3).done == set()
        assert waiting.result(30).size == (6000, 6000)
        assert refused(large[:-60]).code == "image_corrupt"
        assert pool.submit(decode, large).result(30).size == (6000, 6000)  # a broken one has ended its turn


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_longest_images_that_a_format_has_are_decoded(kind: str) -> None:
    long = {"JPEG": 65_500, "WEBP": 16_383}.get(kind, 65_535)
    for size in ((long, 1), (1, long)):
        assert decode(save(Image.new("RGB", size, (9, 9, 9)), kind), side=256).size == size


def test_a_jpeg_of_a_thousand_scans_is_refused() -> None:
    data = save(photo(), "JPEG", progressive=True)
    error = refused(data[:-2] + b"\xff\xda\0\x08\1\1\0\1\1\0" * 1000 + data[-2:])
    assert error.code == "image_corrupt"
    assert "over 100 scans" in str(error)


def test_a_run_length_coded_bmp_of_one_endless_row_is_refused() -> None:
    header = struct.pack("<IiiHHIIiiII", 40, 100_000_000, 1, 1, 8, 1, 0, 0, 0, 256, 0)
    data = b"BM" + struct.pack("<IHHI", 0, 0, 0, 1078) + header + bytes(1024) + b"\0\2\0\xff" * 9
    assert refused(data).code == "image_too_large"


# Colour and tone


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_sixteen_bit_png_is_scaled(colour: int) -> None:
    ramp = np.arange(0, 65536, 16, dtype=">u2")
    channels = [ramp] * (3 if colour & 2 else 1) + [np.full_like(ramp, 65535)] * (colour >> 2)
    found = array(decode(png(4096, 1, 16, colour, b"\0" + np.stack(channels, -1).astype(">u2").tobytes())))[0, :, 0]
    assert len(np.unique(found)) == 256
    assert np.abs(found - ramp / 257).max() < 1


def grey_tiff(values: npt.NDArray[Any], white_is_zero: bool = False) -> Image.Image:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "TIFF", tiffinfo={262: 0} if white_is_zero else {})
    return decode(file.getvalue())


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.array([[0, 257, 32896, 65535]], np.uint16), [0, 1, 128, 255]),
        (np.array([[0, 1, 128, 255]], np.int32), [0, 1, 128, 255]),
        (np.array([[0, 257, 32896, 65535]], np.int32), [0, 1, 128, 255]),
        (np.array([[-1000, 0, 1000, 2000]], np.int32), [0, 85, 170, 255]),
        (np.array([[0, 100_000, 200_000, 300_000]], np.int32), [0, 85, 170, 255]),
        (np.array([[0, 0.25, 0.5, 1]], np.float32), [0, 64, 128, 255]),
        (np.array([[0, 1, 128, 255]], np.float32), [0, 1, 128, 255]),
        (np.array([[-2, np.nan, np.inf, 1]], np.float32), [0, 0, 255, 255]),
        (np.array([[7, 7]], np.float32) * 1e30, [0, 0]),
        (np.array([[0, 0x7F800001, 0x3F800000]], np.uint32).view(np.float32), [0, 0, 255]),  # a NaN of which numpy would warn
    ],
)
def test_deep_grey_is_scaled_and_not_clipped(values: npt.NDArray[Any], wanted: list[int]) -> None:
    assert array(grey_tiff(values))[0, :, 0].tolist() == wanted


def test_big_endian_and_twelve_bit_and_white_is_zero_tiffs_are_scaled() -> None:
    big = b"MM\0*" + struct.pack(">LH", 8, 7)
    for tag, value in ((256, 2), (257, 1), (258, 16), (262, 1), (277, 1), (278, 1)):
        big += struct.pack(">HHLHH", tag, 3, 1, value, 0)
    big += struct.pack(">HHLL", 273, 4, 1, 98) + bytes(4) + b"\x00\x00\xff\xff"
    assert array(decode(big))[0, :, 0].tolist() == [0, 255]
    tags = ((256, 3, 1, 2), (257, 3, 1, 1), (258, 3, 1, 12), (262, 3, 1, 1), (273, 4, 1, 98), (277, 3, 1, 1), (278, 3, 1, 1))
    assert array(decode(tiff(*tags, body=b"\x00\x0f\xff")))[0, :, 0].tolist() == [0, 255]
    inverse = ((256, 3, 1, 2), (257, 3, 1, 1), (258, 3, 1, 16), (262, 3, 1, 0), (273, 4, 1, 98), (277, 3, 1, 1), (278, 3, 1, 1))
    assert array(decode(tiff(*inverse, body=b"\0\0\xff\xff")))[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "AVIF"])
def test_transparency_is_flattened_on_the_background(kind: str, mode: str) -> None:
    image = Image.new("RGBA", (16, 16), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 8, 16))
    options = {"transparency": 0} if mode == "P" and kind == "PNG" else {}
    drawing = image.convert(mode)
    if mode == "P":
        drawing = Image.new("P", (16, 16), 1)
        drawing.putpalette([9, 9, 9, 0, 0, 0])
        drawing.paste(0, (0, 0, 8, 16))
        drawing = drawing if kind == "PNG" else image
    found = decode(save(drawing, kind, **options), background=(250, 200, 150))
    assert found.getpixel((2, 8)) == (250, 200, 150)
    assert array(found)[8, 13].max() < 5
    assert decode(save(drawing, kind, **options)).getpixel((2, 8)) == (255, 255, 255)


def test_half_transparency_is_mixed_with_the_background() -> None:
    assert decode(save(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), "PNG")).getpixel((1, 1)) == (255, 127, 127)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert decode(save(palette, "PNG", transparency=b"\xff\x80")).getpixel((1, 1)) == (255, 127, 127)


@pytest.mark.parametrize(
    ("bits", "colour", "row", "key", "wanted"),
    [
        (1, 0, b"\x0f", (1,), [0, 0, 0, 0, 9, 9, 9, 9]),
        (2, 0, b"\x1b\x1b", (1,), [0, 9, 170, 255] * 2),
        (8, 0, bytes(range(8)), (5,), [0, 1, 2, 3, 4, 9, 6, 7]),
        (16, 0, struct.pack(">8H", *range(1000, 1008)), (1003,), [4, 4, 4, 9, 4, 4, 4, 4]),
        (8, 2, bytes(range(24)), (3, 4, 5), [0, 9, 6, 9, 12, 15, 18, 21]),
        (16, 2, struct.pack(">24H", *range(1000, 1024)), (1009, 1010, 1011), [3, 3, 3, 9, 3, 3, 3, 3]),
    ],
)
def test_the_one_transparent_colour_of_a_png_is_found_at_every_depth(
    bits: int, colour: int, row: bytes, key: tuple[int, ...], wanted: list[int]
) -> None:
    data = png(8, 1, bits, colour, b"\0" + row, chunk(b"tRNS", struct.pack(f">{len(key)}H", *key)))
    assert array(decode(data, background=(9, 9, 9)))[0, :, 0].tolist() == wanted


def test_a_bmp_whose_alpha_was_left_empty_is_opaque() -> None:
    header = struct.pack("<IiiHHIIiiII4I", 56, 2, 1, 1, 32, 3, 0, 0, 0, 0, 0, 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    data = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 56) + header
    assert decode(data + b"\3\2\1\0" * 2).getpixel((0, 0)) == (1, 2, 3)
    assert decode(data + b"\3\2\1\0" + b"\3\2\1\xff").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_comes_out_upright(kind: str) -> None:
    assert difference(decode(save(photo().convert("CMYK"), kind)), photo()) < 2


def test_ycck_comes_out_upright() -> None:
    *colours, black = photo().convert("CMYK").split()
    stored = Image.merge("RGB", colours).convert("YCbCr").split()
    data = save(Image.merge("CMYK", [*map(ImageChops.invert, stored), black]), "JPEG")  # Pillow inverts what it saves
    assert difference(decode(patched(data, data.index(b"Adobe") + 11, "B", 2)), photo()) < 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_a_display_p3_profile_is_converted_and_an_srgb_one_changes_nothing(kind: str) -> None:
    image = Image.new("RGB", (16, 16), (200, 100, 50))
    assert array(decode(save(image, kind, icc_profile=profile(b"RGB ", primaries="p3"))))[8, 8] == pytest.approx([215, 93, 31], abs=2)
    srgb = (profile(b"RGB "), ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    assert all(decode(save(image, kind, icc_profile=one)) == decode(save(image, kind)) for one in srgb)


def test_a_profile_keeps_alpha_and_palette_and_large_pieces() -> None:
    wide = profile(b"RGB ", primaries="p3")
    assert array(decode(save(Image.new("RGBA", (4, 4), (200, 100, 50, 128)), "PNG", icc_profile=wide)))[0, 0] == pytest.approx(
        [235, 174, 143], abs=2
    )
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([200, 100, 50])
    assert array(decode(save(palette, "PNG", icc_profile=wide)))[0, 0] == pytest.approx([215, 93, 31], abs=2)
    long = wide + bytes(200_000)  # in several markers
    assert array(decode(save(Image.new("RGB", (8, 8), (200, 100, 50)), "JPEG", icc_profile=long)))[0, 0] == pytest.approx(
        [215, 93, 31], abs=2
    )


def test_a_grey_profile_is_converted() -> None:
    linear = profile(b"GRAY", gamma=1.0)
    for mode in ("L", "1", "LA"):
        image = Image.new("LA", (8, 8), (55, 255)).convert(mode) if mode != "1" else Image.new("1", (8, 8), 1)
        assert decode(save(image, "PNG", icc_profile=linear)).getpixel((2, 2)) == ((255,) * 3 if mode == "1" else (128,) * 3)


def test_a_cmyk_profile_is_converted() -> None:
    black, white, yellow = (0, 128, 128), (255, 128, 128), (247, 106, 222)  # in Lab
    table = bytes(value for corner in range(16) for value in {0: white, 8: yellow}.get(corner, black))  # cyan prints as yellow
    identity = struct.pack(">9i", *(65536 * (index % 4 == 0) for index in range(9)))
    lookup = b"mft1\0\0\0\0\4\3\2\0" + identity + bytes(range(256)) * 4 + table + bytes(range(256)) * 3
    tags = [(b"A2B0", lookup), (b"A2B1", lookup), (b"wtpt", b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061))]
    at, entries = 132 + 36, b""
    for name, value in tags:
        entries, at = entries + name + struct.pack(">II", at, len(value)), at + len(value) + -len(value) % 4
    head = struct.pack(">I4sI4s4s4s12s4s28s3i", at, b"lcms", 0x02400000, b"prtr", b"CMYK", b"Lab ", b"", b"acsp", b"", 63190, 65536, 54061)
    body = b"".join(value + bytes(-len(value) % 4) for _, value in tags)
    printer = head.ljust(128, b"\0") + struct.pack(">I", 3) + entries + body
    for kind in ("JPEG", "TIFF"):
        found = array(decode(save(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), kind, icc_profile=printer)))[4, 4]
        assert found == pytest.approx([255, 255, 0], abs=24)  # without the profile it would be cyan


@pytest.mark.parametrize("broken", [b"x" * 500, profile(b"RGB ")[:300], profile(b"GRAY", gamma=1.0), profile(b"CMYK")])
def test_a_broken_or_mismatching_profile_is_ignored(broken: bytes) -> None:
    image = Image.new("RGB", (8, 8), (200, 100, 50))
    assert difference(decode(save(image, "PNG", icc_profile=broken)), image) == 0


# Orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied_once(kind: str, orientation: int) -> None:
    exif, turn = Image.Exif(), TURNS[orientation]
    exif[0x0112] = orientation
    found = decode(save(photo(), kind, exif=exif))
    assert difference(found, photo() if turn is None else photo().transpose(turn)) < 2
    assert found.getexif().get(0x0112, 1) == 1  # so that nobody turns it again


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_compressed_tiff_is_turned_once(compression: str) -> None:
    data = save(photo(), "TIFF", tiffinfo={0x0112: 6}, compression=compression)
    assert difference(decode(data), photo().transpose(Image.Transpose.ROTATE_270)) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("tail", [b"", b"rubbish", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\5abc", b"II+\0\x08\0\0\0" + b"\xff" * 8])
def test_broken_exif_means_upright(kind: str, tail: bytes) -> None:
    assert decode(save(photo(), kind, exif=b"Exif\0\0" + tail)).size == (96, 64)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_means_upright(value: int) -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1" + struct.pack(">HH", value, 0) + bytes(4)
    assert decode(save(photo(), "JPEG", exif=exif)).size == (96, 64)
    assert decode(save(photo(), "TIFF", tiffinfo={0x0112: value})).size == (96, 64)


def test_broken_exif_in_an_avif_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x010E] = "x" * 50
    data = save(photo(), "AVIF", exif=exif)
    at = data.rindex(b"II*\0") if b"II*\0" in data else data.rindex(b"MM\0*")
    assert difference(decode(data[:at] + b"\xff" * 8 + data[at + 8 :]), photo()) < 2


# Cost


def test_a_twelve_megapixel_jpeg_is_decoded_at_a_smaller_scale() -> None:
    data = save(photo((4000, 3000)), "JPEG", quality=85)
    small, full = decode(data, side=256), decode(data)
    assert (small.size, full.size) == ((1000, 750), (4000, 3000))
    assert difference(small.resize((96, 64)), full.resize((96, 64))) < 2


@pytest.mark.parametrize(("side", "shorter"), [(10, 40), (20, 40), (21, 80), (40, 80), (80, 160), (81, 320), (200, 320), (None, 320)])
def test_the_shorter_side_stays_at_least_twice_what_is_asked(side: int | None, shorter: int) -> None:
    assert min(decode(save(photo((480, 320)), "JPEG"), side=side).size) == shorter


def in_a_process_of_its_own(code: str) -> list[str]:
    """Its memory and modules are then nobody else's; it prints what it found."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_very_long_image_takes_little_memory() -> None:
    code = """
import io, resource
from PIL import Image
from models.images import decode
files = []
for kind in ("JPEG", "PNG", "TIFF", "BMP", "GIF"):
    file = io.BytesIO(); Image.new("RGB", (1, 60000)).save(file, kind); files.append(file.getvalue())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert {decode(data, side=256).size for data in files} == {(1, 60000)}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(in_a_process_of_its_own(code)[0]) < 20_000  # kilobytes


def test_torch_is_not_imported() -> None:
    code = "import sys, models.images; print(*{name.partition('.')[0] for name in sys.modules})"
    modules = in_a_process_of_its_own(code)
    assert "PIL" in modules
    assert not {"torch", "torchvision", "pillow_heif"} & set(modules)


def test_threads_do_not_disturb_each_other() -> None:
    wide = profile(b"RGB ", primaries="p3")
    files = [save(photo((300, 200)), "JPEG", icc_profile=wide), save(photo(), "TIFF", compression="tiff_lzw"), save(photo(), "AVIF")]
    wanted = [decode(data) for data in files]
    found: Callable[[int], bool] = lambda number: decode(files[number % 3]) == wanted[number % 3]  # noqa: E731
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(found, range(120)))


def test_warnings_of_pillow_stay_inside() -> None:
    data = save(photo(), "TIFF", tiffinfo={305: "x" * 99})
    at = data.index(struct.pack("<HHL", 305, 2, 100)) + 8
    assert decode(patched(data, at, "<L", len(data) - 3)).size == (96, 64)  # the tag's text would end after the file


def test_a_hostile_fax_tiff_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    body = bytes((i * 37 + 11) & 255 for i in range(20_000))
    tags = ((256, 4, 1, 8), (257, 4, 1, 60_000), (258, 3, 1, 1), (259, 3, 1, 3), (262, 3, 1, 0), (273, 4, 1, 134), (277, 3, 1, 1))
    with contextlib.suppress(ImageError):
        decode(tiff(*tags, (278, 4, 1, 60_000), (279, 4, 1, len(body)), (292, 4, 1, 0), body=body))
    assert capfd.readouterr().err == ""


def test_no_side_may_be_longer_than_a_jpegs() -> None:
    assert "65535 a side" in str(refused(patched(save(photo((8, 8)), "BMP"), 18, "<ii", 1, 65_536)))
