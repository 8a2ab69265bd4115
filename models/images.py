"""Bytes of any image file -> an RGB image as a person would see it, or an ImageError that says what is wrong.

    bytes -> sniff: which format -> its opener: limits from the header, metadata bombs dropped -> Pillow decodes
          -> colour.flatten: tones, embedded colour profile, transparency -> orientation -> RGB

Only what makes the picture reaches Pillow: of JPEG and PNG the metadata is read here and left out, since Pillow would parse all of
it, warn about it, and refuse a good picture for a bad comment. Training and serving use this one function.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageChops,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from models import colour

FORMATS = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", "AVIF")  # always; HEIC where pillow-heif is installed

MAX_BLOCKS = 100_000  # chunks of a PNG, blocks before a GIF's first frame, entries of a TIFF tag
MAX_SIDE = 65_535  # as in JPEG: Pillow needs far more memory and time for each row than for each pixel
MAX_SEGMENTS = 4096  # before a JPEG's picture
MAX_SCANS = 100  # of a progressive JPEG: each costs a pass over the whole picture, and ten are usual

# Pictures of over 32 megapixels take turns: one takes up to 15 bytes for each pixel (WebP), and no body need be large for that.
LARGE = 32_000_000
_LARGE_TURN = threading.RLock()

_T = Image.Transpose
_TURNS = {
    2: _T.FLIP_LEFT_RIGHT, 3: _T.ROTATE_180, 4: _T.FLIP_TOP_BOTTOM, 5: _T.TRANSPOSE, 6: _T.ROTATE_270, 7: _T.TRANSVERSE, 8: _T.ROTATE_90,
}  # fmt: skip

_Check = Callable[[tuple[int, int]], None]
_Info = dict[str | tuple[int, int], Any]


class ImageError(ValueError):
    """An image that can't be used. `code` is not_an_image, unsupported_format, image_too_large or image_corrupt; the text is public."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _broken(what: str) -> ImageError:
    return ImageError("image_corrupt", f"{what}. Save it again or send another.")


def decode(
    data: bytes, *, side: int | None = None, max_pixels: int = 100_000_000, background: tuple[int, int, int] = (255, 255, 255)
) -> Image.Image:
    """Decode a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC file into an upright sRGB image of mode "RGB".

    The first frame of several. `side` is the length to which the caller will scale the shorter side: a JPEG is then decoded at the
    smallest of the scales 1, 1/2, 1/4, 1/8 whose shorter side is at least twice that. More than `max_pixels` in the header are refused
    before memory is taken. Transparency is flattened on `background`. Tones: 16 bits are scaled to 8; 32-bit and float samples are
    taken as 0..1 (floats), 0..255 or 0..65535, the least of them that holds every value, and stretched from least to greatest if none does.

    Raises ImageError and nothing else, whatever the bytes. Safe to call from several threads at once.
    """

    def check(size: tuple[int, int]) -> None:
        if min(size) < 1:
            raise _broken(f"The image has {size[0]} x {size[1]} pixels by its header")
        if max(size) > MAX_SIDE:
            raise ImageError(
                "image_too_large", f"The image has {size[0]} x {size[1]} pixels, the limit is {MAX_SIDE} a side. Send a smaller one."
            )
        if size[0] * size[1] > max_pixels:
            limit = f"the limit is {max_pixels / 1e6:g} megapixels. Send a smaller one."
            raise ImageError("image_too_large", f"The image has {size[0]} x {size[1]} pixels, {limit}")
        if size[0] * size[1] > LARGE:
            turn_of_large.enter_context(_LARGE_TURN)

    name = sniff(data)
    turn_of_large = contextlib.ExitStack()
    try:
        Image.MAX_IMAGE_PIXELS = None
        image = _OPENERS[name](data, check)
        check(image.size)
        scale = next((scale for scale in (8, 4, 2) if name == "JPEG" and side and min(image.size) >= 2 * side * scale), 1)
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        image.load()
        turn = None if name == "TIFF" else _TURNS.get(_orientation(image.info.get("exif")))  # Pillow turns TIFFs itself
        image = colour.flatten(image, background)
        image.info = {}  # what stood there no longer holds for these pixels: orientation, profile, transparency
        return image if turn is None else image.transpose(turn)
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("image_too_large", f"The {name} needs more memory than there is. Send a smaller one.") from None
    except Exception as error:
        cut = isinstance(error, (EOFError, IndexError, StopIteration, struct.error)) or "truncated" in str(error).lower()
        how = "is cut short: it ends before its picture does" if cut else "is broken: its picture does not decode"
        raise _broken(f"The {name} {how}") from error
    finally:
        turn_of_large.close()


# Which format

_OWN = {
    "JPEG": (b"\xff\xd8\xff",), "PNG": (b"\x89PNG\r\n\x1a\n",), "GIF": (b"GIF87a", b"GIF89a"),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
}  # fmt: skip
_FOREIGN: dict[str, tuple[bytes, ...]] = {  # what people send, too, by how it begins
    "PDF": (b"%PDF",), "PostScript": (b"%!PS", b"\xc5\xd0\xd3\xc6"), "Photoshop PSD": (b"8BPS",), "GIMP XCF": (b"gimp xcf",),
    "Windows icon (ICO)": (b"\0\0\1\0", b"\0\0\2\0"), "JPEG 2000": (b"\0\0\0\x0cjP  ", b"\xffO\xffQ"), "JPEG XR": (b"II\xbc\1",),
    "JPEG XL": (b"\0\0\0\x0cJXL ", b"\xff\n"), "OpenEXR": (b"v/1\1",), "Radiance HDR": (b"#?RADIANCE", b"#?RGBE"), "FITS": (b"SIMPLE  =",),
    "PNM": tuple(b"P%d%c" % (kind, space) for kind in range(1, 8) for space in b" \n"), "DDS": (b"DDS ",), "QOI": (b"qoif",),
    "WebM or Matroska video": (b"\x1aE\xdf\xa3",), "Ogg file": (b"OggS",), "zip archive": (b"PK\3\4",), "gzip archive": (b"\x1f\x8b",),
    "camera raw": (b"FUJIFILMCCD-RAW", b"IIRO", b"IIRS", b"MMOR", b"IIU\0"), "Windows metafile": (b"\xd7\xcd\xc6\x9a",),
}  # fmt: skip


def sniff(data: bytes) -> str:
    """The format that the bytes themselves show; their name and content type don't count."""
    if own := next((name for name, beginnings in _OWN.items() if data.startswith(beginnings)), None):
        return own
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    # Two letters alone begin many a text: the size of the second header must be one that exists, too.
    if data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in (12, 40, 52, 56, 64, 108, 124):
        return "BMP"
    foreign = next((name for name, beginnings in _FOREIGN.items() if data.startswith(beginnings)), None)
    foreign = "DICOM" if data[128:132] == b"DICM" else foreign
    if data[4:8] == b"ftyp":
        brands = {data[8:12], *(data[at : at + 4] for at in range(16, min(int.from_bytes(data[:4], "big"), 256), 4))}
        if brands & {b"avif", b"avis"}:
            return "AVIF"
        if brands & {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}:
            return "HEIC"
        foreign = "Canon raw (CR3)" if b"crx " in brands else "MP4 or QuickTime video"
    head = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip()
    if head[:5].lower() == b"<?xml" or head[:4].lower() == b"<svg":
        foreign = "SVG or other XML"
    if foreign:
        raise ImageError("unsupported_format", f"{foreign} is not decoded here. Send one of {', '.join(FORMATS)}.")
    raise ImageError("not_an_image", f"These {len(data)} bytes are no image. Send the bytes of an image file: one of {', '.join(FORMATS)}.")


# Openers: limits that must hold before Pillow takes memory or time; the image comes back not yet decoded

_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")  # those that a length follows
_DROPPED = (*range(0xE0, 0xF0), 0xFE)  # application data and comments
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # what tells the size and the coding
_DECODED = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA)  # sequential, progressive, lossless


def _open_jpeg(data: bytes, check: _Check) -> Image.Image:
    parts, info, profile, position = [b"\xff\xd8"], _Info(), {}, 2
    for _ in range(MAX_SEGMENTS):
        marker = next(_MARKER.finditer(data, position))
        code, start = marker[1][0], marker.end()
        if code == 0xDA:
            break
        position = start + int.from_bytes(data[start : start + 2], "big")
        body = data[start + 2 : position]
        if code == 0xE1 and body[:6] == b"Exif\0\0":
            info.setdefault("exif", body)
        elif code == 0xE2 and body[:12] == b"ICC_PROFILE\0" and len(body) > 14:
            profile[body[12]] = (body[13], body[14:])
        elif code in _FRAMES:
            bits, height, width = struct.unpack_from(">BHH", body)
            if code not in _DECODED or bits != 8:
                kind = f"JPEG of {bits} bits and coding SOF{code & 15}"
                raise ImageError("unsupported_format", f"{kind} is not decoded here. Save it as an ordinary JPEG.")
            check((width, height))
            parts.append(data[marker.start() : position])
        elif code not in _DROPPED or (body[:5] in (b"JFIF\0", b"Adobe") and len(body) >= 12):  # these two say how colours are stored
            parts.append(data[marker.start() : position])
    else:
        raise _broken(f"The JPEG has over {MAX_SEGMENTS} segments before its picture")
    image = JpegImagePlugin.JpegImageFile(io.BytesIO(b"".join([*parts, memoryview(data)[marker.start() :]])))
    if image.info.get("progressive") and data.count(b"\xff\xda") > MAX_SCANS:
        raise _broken(f"The JPEG has over {MAX_SCANS} scans")
    image.decodermaxblock = len(data)  # all at once: after each 64 KB Pillow would copy, and wait for other threads to yield the GIL
    if profile and all(total == len(profile) for total, _ in profile.values()):
        info["icc_profile"] = b"".join(profile[number][1] for number in sorted(profile))
    image.info |= info
    return image


def _open_png(data: bytes, check: _Check) -> Image.Image:
    view, info, position = memoryview(data), _Info(), 8
    parts = [view[:8]]
    if data[12:16] == b"CgBI":
        raise ImageError("unsupported_format", "Apple's own form of PNG is not decoded here. Save it as an ordinary PNG.")
    check(struct.unpack_from(">II", data, 16))
    for _ in range(MAX_BLOCKS):
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        name = data[position + 4 : position + 8]
        if name in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            parts.append(view[position:end])
        elif name == b"eXIf":
            info["exif"] = data[position + 8 : end - 4]
        elif name == b"iCCP" and "icc_profile" not in info:
            info["icc_profile"] = b""  # the first one counts, and is unpacked once even if it is broken
            packed = data[position + 8 : end - 4].partition(b"\0")[2][1:]
            with contextlib.suppress(zlib.error):
                info["icc_profile"] = zlib.decompressobj().decompress(packed, colour.MAX_PROFILE_BYTES + 1)
        if name == b"IEND" or end > len(data):
            break
        position = end
    else:
        raise _broken(f"The PNG has over {MAX_BLOCKS} chunks")
    stream = b"".join(parts)
    image = PngImagePlugin.PngImageFile(io.BytesIO(stream))
    bits, key = data[24], image.info.get("transparency")
    if key is not None and image.mode in ("1", "L"):  # it is given in the file's levels, not the image's
        image.info["transparency"] = (key & (1 << bits) - 1) * (255 // ((1 << bits) - 1))
    elif key is not None and image.mode == "RGB":
        image.info["transparency"] = tuple(k & 255 for k in key)
        if bits == 16:
            # Pillow keeps the high bytes only, too few to find the one transparent colour: the other byte order gives the low ones.
            low = PngImagePlugin.PngImageFile(io.BytesIO(stream))
            low.tile = [tile._replace(args="RGB;16L") for tile in low.tile]
            other = Image.new("L", image.size)  # 255 where a byte differs from the transparent colour's
            for picture, shift in ((image, 8), (low, 0)):
                for band, k in enumerate(key):
                    differs = picture.getchannel(band).point([255 * (level != k >> shift & 255) for level in range(256)])
                    other = ImageChops.lighter(other, differs)
            image.putalpha(other)
    image.info |= info
    return image


def _open_webp(data: bytes, check: _Check) -> Image.Image:
    if data[12:16] == b"VP8X":
        check((1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")))
    elif data[12:16] == b"VP8L":
        size = int.from_bytes(data[21:25], "little")
        check((1 + (size & 0x3FFF), 1 + (size >> 14 & 0x3FFF)))
    elif data[12:16] == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        check((width & 0x3FFF, height & 0x3FFF))
    return WebPImagePlugin.WebPImageFile(io.BytesIO(data))


def _open_gif(data: bytes, check: _Check) -> Image.Image:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, inside = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0), False
    for _ in range(MAX_BLOCKS):
        byte = data[position]
        if inside:  # an extension's data: blocks, each led by its length, up to an empty one
            position, inside = position + byte + 1, byte > 0
        elif byte == ord(","):
            break
        else:
            position, inside = position + (2 if byte == ord("!") else 1), byte == ord("!")
    else:
        raise _broken(f"The GIF has over {MAX_BLOCKS} blocks before its first picture")
    left, top, right, bottom = struct.unpack_from("<4H", data, position + 1)
    box = (left, top, left + right, top + bottom)
    check((right, bottom))
    check(size := (max(width, box[2]), max(height, box[3])))  # here: for some disposals Pillow makes a canvas when it opens the file
    image: Image.Image = GifImagePlugin.GifImageFile(io.BytesIO(data))
    if box != (0, 0, *size):  # nothing was drawn outside the frame, where Pillow has colour 0
        frame, image = image.convert("RGBA").crop(box), Image.new("RGBA", size)
        image.paste(frame, box)
    return image


def _open_bmp(data: bytes, check: _Check) -> Image.Image:
    width, height = struct.unpack_from("<HH" if data[14] == 12 else "<ii", data, 18)
    check((width, abs(height)))  # a height below 0: from the top down
    image = BmpImagePlugin.BmpImageFile(io.BytesIO(data))
    if image.info["compression"] in (1, 2) and (image.width > 65535 or image.width * image.height > 16 << 20 or len(data) > 4 << 20):
        raise ImageError("image_too_large", "The BMP is too large for a run-length coded one. Save it as PNG.")  # decoded in Python
    if image.mode == "RGBA" and image.getchannel("A").getextrema() == (0, 0):
        return image.convert("RGB")  # many programs leave the fourth byte empty
    return image


_ORIENTATION = 0x0112


class _Tiff(TiffImagePlugin.TiffImageFile):
    def getexif(self) -> Image.Exif:
        """The orientation alone, for Pillow to apply: it would read other directories, too, and trip over broken ones."""
        exif = Image.Exif()
        exif[_ORIENTATION] = self.tag_v2.get(_ORIENTATION, 1)
        return exif


_QUIET = re.compile(r"PIL\.TiffImagePlugin")


def _open_tiff(data: bytes, check: _Check) -> Image.Image:
    tags = _directory(data)
    check((tags[256][2], tags[257][2]))
    if 322 in tags and 323 in tags:
        check((tags[322][2], tags[323][2]))  # a tile may be larger than the image
    total = sum(_SIZES.get(kind, 0) * count for kind, count, _ in tags.values())
    if total > len(data) or any(count > MAX_BLOCKS and kind not in (1, 2, 7) for kind, count, _ in tags.values()):
        raise _broken(f"The TIFF has tags that share their bytes, or over {MAX_BLOCKS} values in one")
    samples, coding = tags.get(277, (0, 0, 1))[2], tags.get(259, (0, 0, 1))[2]
    if samples > TiffImagePlugin.MAX_SAMPLESPERPIXEL or coding not in TiffImagePlugin.COMPRESSION_INFO:
        kind = f"TIFF of {samples} samples a pixel and compression {coding}"
        raise ImageError("unsupported_format", f"{kind} is not decoded here. Save it as PNG or as another TIFF.")
    _silence_libtiff()
    # Pillow warns about tags that don't matter here; catch_warnings would not do, since other threads decode at the same time.
    if ("ignore", None, UserWarning, _QUIET, 0) not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=_QUIET.pattern)
    image = _Tiff(io.BytesIO(data))
    if max((tile.extents[3] for tile in image.tile if tile.extents), default=0) < tags[257][2]:
        raise _broken("The TIFF is cut short: strips or tiles are missing")
    return image


@cache
def _silence_libtiff() -> None:
    """libtiff prints a line to stderr for every broken row, millions for a hostile file; Pillow has no switch for it.

    What Pillow itself logs as an error of a TIFF it raises, too.
    """
    logging.getLogger(TiffImagePlugin.__name__).setLevel(logging.CRITICAL)
    for library in {word for word in Path("/proc/self/maps").read_text().split() if "/libtiff" in word}:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).TIFFSetErrorHandler(None)
            ctypes.CDLL(library).TIFFSetWarningHandler(None)


def _open_avif(data: bytes, check: _Check) -> Image.Image:
    if not AvifImagePlugin.SUPPORTED:
        raise ImageError("unsupported_format", "This server's Pillow has no AVIF. Send JPEG, PNG or WebP.")
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # the callers decode several images at once
    # AVIF's own boxes turn the image and EXIF has no say; Pillow would refuse the file for broken EXIF, so the decoder must not see it.
    boxes, mdat, rest = data.partition(b"mdat")
    for found in re.finditer(rb"ispe\0{4}(.{8})", boxes, re.DOTALL):  # sizes, of thumbnails and of tiles, too
        check(struct.unpack(">II", found[1]))
    return AvifImagePlugin.AvifImageFile(io.BytesIO(boxes.replace(b"\0\0Exif", b"\0\0none") + mdat + rest))


def _open_heic(data: bytes, check: _Check) -> Image.Image:
    try:
        import pillow_heif
    except ImportError:
        raise ImageError("unsupported_format", "HEIC needs pillow-heif here (pip install pillow-heif). Send JPEG, PNG or WebP.") from None
    pillow_heif.register_heif_opener()
    return Image.open(io.BytesIO(data), formats=["HEIF"])  # pillow-heif turns it and says orientation 1


_OPENERS = {
    "JPEG": _open_jpeg, "PNG": _open_png, "WebP": _open_webp, "GIF": _open_gif,
    "BMP": _open_bmp, "TIFF": _open_tiff, "AVIF": _open_avif, "HEIC": _open_heic,
}  # fmt: skip


_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}


def _directory(tiff: bytes) -> dict[int, tuple[int, int, int]]:
    """Tag -> type, count, value (the first, if it stands in the entry) of the first directory of a TIFF file, or of EXIF, which is one."""
    order = {b"II": "<", b"MM": ">"}[tiff[:2]]
    big = 43 in tiff[2:4]
    start = struct.unpack_from(order + ("Q" if big else "L"), tiff, 8 if big else 4)[0]
    number = struct.unpack_from(order + ("Q" if big else "H"), tiff, start)[0]
    entry, start = struct.Struct(order + ("HHQ8s" if big else "HHL4s")), start + (8 if big else 2)
    tags: dict[int, tuple[int, int, int]] = {}
    for at in range(start, start + min(number, 4096) * entry.size, entry.size):
        tag, kind, count, field = entry.unpack_from(tiff, at)
        code = {1: "B", 3: "H", 4: "L", 16: "Q"}.get(kind, "x")
        tags.setdefault(tag, (kind, count, next(iter(struct.unpack_from(order + code, field)), 0)))
    return tags


def _orientation(exif: Any) -> int:
    """1 to 8; 1 where EXIF is broken or says nothing."""
    try:
        return _directory(exif.removeprefix(b"Exif\0\0").removeprefix(b"Exif\0\0"))[_ORIENTATION][2]
    except (AttributeError, LookupError, OverflowError, struct.error):
        return 1
