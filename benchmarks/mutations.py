"""Image files of every format, coding and mode that matters, and what a mutation makes of them: always the same of a seed and a number."""

import io
import itertools
import random
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

# Subjects: whole files


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    # Without the times at which an AVIF sequence was made: the same photos must give the same files.
    return re.sub(rb"(mvhd|tkhd|mdhd)(\x01...).{16}", rb"\1\2" + bytes(16), file.getvalue(), flags=re.DOTALL)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(image: Image.Image, bits: int = 8, interlaced: bool = False) -> bytes:
    """An RGB PNG of 16 bits or interlaced, which Pillow doesn't write."""
    values = np.asarray(image.convert("RGB"))
    values = values.astype(">u2") * 257 if bits == 16 else values
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = [row for y, x, down, right in (passes if interlaced else ((0, 0, 1, 1),)) for row in values[y::down, x::right] if row.size]
    header = struct.pack(">IIBBBBB", *image.size, bits, 2, 0, 0, interlaced)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _rle_bmp(image: Image.Image) -> bytes:
    """A BMP of compression 1, which Pillow doesn't write: runs of palette indices."""
    values = np.asarray(image.convert("L"))[::-1] & 0xE0
    runs = (b"".join(bytes((len(run := list(same)), run[0])) for _, same in itertools.groupby(row.tolist())) + b"\0\0" for row in values)
    body = b"".join(runs) + b"\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, *image.size, 1, 8, 1, len(body), 0, 0, 256, 0)
    palette = bytes(itertools.chain.from_iterable((level, level, level, 0) for level in range(256)))
    return b"BM" + struct.pack("<IHHI", 14 + 40 + 1024 + len(body), 0, 0, 14 + 40 + 1024) + header + palette + body


def _tiled_tiff(image: Image.Image, side: int = 32) -> bytes:
    """A TIFF of deflated tiles, which Pillow doesn't write."""
    wide, high = (-(-length // side) for length in image.size)
    whole = image.convert("RGB").crop((0, 0, wide * side, high * side))
    boxes = [(x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(high) for x in range(wide)]
    tiles, count = [zlib.compress(whole.crop(box).tobytes()) for box in boxes], len(boxes)
    lists = 8 + 2 + 12 * 11 + 4 + 6  # where the lists of offsets and lengths begin
    at = lists + 8 * count
    offsets = [at + sum(map(len, tiles[:number])) for number in range(count)]
    tags = [(256, 3, 1, image.width), (257, 3, 1, image.height), (258, 3, 3, lists - 6), (259, 3, 1, 8), (262, 3, 1, 2), (277, 3, 1, 3)]
    tags += [(284, 3, 1, 1), (322, 3, 1, side), (323, 3, 1, side), (324, 4, count, lists), (325, 4, count, lists + 4 * count)]
    entries = b"".join(struct.pack("<HHLL", *tag) for tag in tags)
    numbers = struct.pack(f"<{2 * count}L", *offsets, *map(len, tiles))
    return b"II*\0" + struct.pack("<LH", 8, len(tags)) + entries + bytes(4) + struct.pack("<3H", 8, 8, 8) + numbers + b"".join(tiles)


def _metadata() -> dict[str, Any]:
    from PIL import ImageCms

    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x9003] = 6, "a description", "2020:01:01 00:00:00"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return {"exif": exif, "icc_profile": profile[:24] + bytes(12) + profile[36:]}  # without the time at which it was made


def subjects(photos: Sequence[bytes]) -> list[bytes]:
    """Whole files: each photo in a few of the forms below, the first of them in all; and the photos themselves."""
    made = list(photos[:4])
    for number, photo in enumerate(photos):
        with Image.open(io.BytesIO(photo)) as opened:
            image = opened.convert("RGB").resize((96, 72) if number % 2 else (48, 80))
        forms = _forms(image)
        made += [form() for form in (forms if number == 0 else forms[number % 7 :: 7])]
    return made


def _forms(image: Image.Image) -> list[Callable[[], bytes]]:
    save, more = partial(partial, _saved), _metadata()
    clear = image.convert("RGBA")
    clear.putalpha(image.convert("L"))
    frames: dict[str, Any] = {"save_all": True, "append_images": [image.rotate(90), image.rotate(180)], "duration": 40}
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    jpegs: list[dict[str, Any]] = [{}, {"progressive": True}, {"restart_marker_blocks": 3}, {"optimize": True, "subsampling": 0}]
    jpegs += [more, {"comment": b"x" * 300}]
    tiffs = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "zstd", "lzma")
    return [
        *(save(image, "JPEG", **options) for options in jpegs),
        *(save(image.convert(mode), "JPEG") for mode in ("L", "CMYK")),
        save(image, "MPO", save_all=True, append_images=[image.rotate(90)]),
        *(save(picture, "PNG") for picture in (image, clear, deep, *(image.convert(mode) for mode in ("1", "L", "LA", "P")))),
        save(image.convert("P"), "PNG", transparency=bytes(range(256)), **more),
        *(partial(_png, image, bits, interlaced) for bits, interlaced in ((16, False), (8, True), (16, True))),
        save(image, "PNG", **frames),
        *(save(picture, "WEBP", lossless=lossless) for picture in (image, clear) for lossless in (False, True)),
        save(image, "WEBP", **more),
        save(clear, "WEBP", **frames),
        *(save(picture, "GIF", **options) for picture in (image, clear) for options in ({"interlace": 0}, frames)),
        *(save(image.convert(mode), "BMP") for mode in ("1", "L", "P", "RGB", "RGBA")),
        partial(_rle_bmp, image),
        *(save(image, "TIFF", compression=coding) for coding in tiffs),
        *(save(image.convert("1"), "TIFF", compression=coding) for coding in ("group3", "group4", "tiff_ccitt")),
        *(save(image.convert(mode), "TIFF", icc_profile=b"") for mode in ("1", "L", "LA", "P", "CMYK", "LAB", "I", "F", "RGBA")),
        save(deep, "TIFF", compression="tiff_lzw"),
        save(image, "TIFF", big_tiff=True, **more),
        save(image, "TIFF", save_all=True, append_images=[image.rotate(90)]),
        partial(_tiled_tiff, image),
        *(save(picture, "AVIF", speed=10, **options) for picture in (image, clear) for options in ({}, more)),
        save(image, "AVIF", speed=10, save_all=True, append_images=[image.rotate(90)]),
    ]


# Mutations


@dataclass
class _Parts:
    """Where the parts of a file (segments, chunks, boxes, directory entries) lie, and its numbers that tell lengths, sizes and types."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[tuple[int, str]] = field(default_factory=list)  # position, struct format


def _parts(data: bytes) -> _Parts:
    """Of a whole file; of a broken one what can be found."""
    parts = _Parts()
    try:
        if data[:2] == b"\xff\xd8":
            _jpeg_parts(data, parts)
        elif data[:4] == b"\x89PNG":
            parts.numbers += [(16, ">I"), (20, ">I"), *((at, ">B") for at in range(24, 29))]
            _chunk_parts(data, 8, len(data), ">I", parts, trailer=4)
        elif data[:4] == b"RIFF":
            parts.numbers += [(4, "<I"), (20, "<I"), (24, "<I"), (26, "<H"), (28, "<H")]
            _chunk_parts(data, 12, len(data), "<I", parts)
        elif data[:3] == b"GIF":
            parts.numbers += [(6, "<H"), (8, "<H"), (10, "B"), (11, "B")]
            for at in [at for at, byte in enumerate(data) if byte in b"!,"][:40]:
                parts.spans.append((at, min(at + 10, len(data))))
                parts.numbers += [(at, "B"), (at + 1, "<H"), (at + 3, "<H"), (at + 5, "<H"), (at + 7, "<H"), (at + 9, "B")]
        elif data[:2] == b"BM":
            parts.numbers += [(2, "<I"), (10, "<I"), (26, "<H"), (28, "<H"), *((at, "<i") for at in (14, 18, 22, *range(30, 122, 4)))]
        elif data[:2] in (b"II", b"MM"):
            _tiff_parts(data, parts)
        elif data[4:8] == b"ftyp":
            _box_parts(data, 0, len(data), parts)
    except (struct.error, IndexError, OverflowError):
        pass
    parts.numbers = [(at, form) for at, form in parts.numbers if at + struct.calcsize(form) <= len(data)]
    parts.spans = [(start, end) for start, end in parts.spans if start < end <= len(data)]
    return parts


def _jpeg_parts(data: bytes, parts: _Parts) -> None:
    at = 2
    while data[at] == 0xFF and len(parts.spans) < 200:
        length = struct.unpack_from(">H", data, at + 2)[0]
        parts.spans.append((at, at + 2 + length))
        parts.numbers += [(at + 1, "B"), (at + 2, ">H")]
        if 0xC0 <= data[at + 1] <= 0xCF:  # a frame's size and components, or a Huffman table
            parts.numbers += [(at + 4, "B"), (at + 5, ">H"), (at + 7, ">H"), *((at + 9 + byte, "B") for byte in range(10))]
        elif data[at + 1] in (0xDA, 0xDB, 0xDD):
            parts.numbers += [(at + 4 + byte, "B") for byte in range(10)]
        if data[at + 1] == 0xDA:
            return
        at += 2 + length


def _chunk_parts(data: bytes, at: int, end: int, form: str, parts: _Parts, trailer: int = 0) -> None:
    """Chunks of PNG (length, name, body, sum) or RIFF (name, length, body, and a byte where that is odd)."""
    while at + 8 <= end and len(parts.spans) < 200:
        length = struct.unpack_from(form, data, at if trailer else at + 4)[0]
        parts.spans.append((at, at + 8 + length + (trailer or length & 1)))
        parts.numbers += [(at, ">I"), (at + 4, form), *((at + 8 + byte, form) for byte in range(0, min(length, 24), 4))]
        if data[at : at + 4] == b"ANMF":
            _chunk_parts(data, at + 24, at + 8 + length, form, parts)
        at = parts.spans[-1][1] if data[at : at + 4] != b"ANMF" else at + 8 + length


def _tiff_parts(data: bytes, parts: _Parts) -> None:
    order, big = {b"II": "<", b"MM": ">"}[data[:2]], 43 in data[2:4]
    word, size = ("Q", 20) if big else ("L", 12)
    parts.numbers.append((8 if big else 4, order + word))
    at = struct.unpack_from(order + word, data, 8 if big else 4)[0]
    count = struct.unpack_from(order + ("Q" if big else "H"), data, at)[0]
    parts.numbers.append((at, order + ("Q" if big else "H")))
    for entry in range(at + (8 if big else 2), at + (8 if big else 2) + min(count, 60) * size, size):
        parts.spans.append((entry, entry + size))
        parts.numbers += [(entry, order + "H"), (entry + 2, order + "H"), (entry + 4, order + word), (entry + size // 2 + 2, order + "H")]
        parts.numbers.append((entry + (12 if big else 8), order + word))


def _box_parts(data: bytes, at: int, end: int, parts: _Parts) -> None:
    while at + 8 <= end and len(parts.spans) < 200:
        length, name = struct.unpack_from(">I", data, at)[0], data[at + 4 : at + 8]
        if length < 8:
            return
        parts.spans.append((at, at + length))
        parts.numbers += [(at, ">I"), (at + 4, ">I"), *((at + 8 + byte, ">I") for byte in range(0, min(length - 8, 40), 4))]
        parts.numbers += [(at + 8 + byte, ">H") for byte in range(0, min(length - 8, 40), 2)]
        inside = {b"meta": 12, b"iprp": 8, b"ipco": 8, b"moov": 8, b"trak": 8, b"mdia": 8, b"minf": 8, b"stbl": 8, b"iinf": 14}.get(name)
        if inside:
            _box_parts(data, at + inside, at + length, parts)
        at += length


def _summed(data: bytes | bytearray) -> bytes:
    """A PNG with the check sums that its chunks need, so that what lies behind them is reached."""
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = zlib.crc32(out[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(out)


def mutated(files: Sequence[bytes], seed: int, number: int) -> bytes:
    """The `number`-th mutated file of `seed`: the same for the same files, whatever was made before."""
    chance = random.Random(f"{seed}:{number}")
    data = bytearray(chance.choice(files))
    png = data[:4] == b"\x89PNG"
    for _ in range(chance.choice((1, 1, 1, 1, 2, 2, 4))):
        _mutate(data, files, chance)
    return _summed(data) if png and chance.random() < 0.8 else bytes(data)


_KINDS = ("bytes",) * 4 + ("numbers",) * 6 + ("cut", "run", "splice", "swap", "repeat", "drop", "many", "head")


def _mutate(data: bytearray, files: Sequence[bytes], chance: random.Random) -> None:
    parts, length = _parts(bytes(data)), max(len(data), 1)
    at = chance.randrange(min(length, chance.choice((64, 1024, length))))
    kind = chance.choice(_KINDS)
    if kind == "bytes":
        for _ in range(chance.choice((1, 4, 30)) if data else 0):
            data[chance.randrange(min(len(data), chance.choice((64, 1024, len(data)))))] = chance.randrange(256)
    elif kind == "numbers" and parts.numbers:
        for _ in range(chance.choice((1, 1, 2, 4))):
            where, form = chance.choice(parts.numbers)
            top = 1 << 8 * struct.calcsize(form)
            old = int.from_bytes(data[where : where + struct.calcsize(form)], "little" if form[0] == "<" else "big")
            values = (0, 1, old - 1, old + 1, old * 2, old // 2, top - 1, top // 2, top // 2 - 1, 9_000, 65_535, chance.randrange(top))
            data[where : where + struct.calcsize(form)] = (chance.choice(values) % top).to_bytes(
                struct.calcsize(form), "little" if form[0] == "<" else "big"
            )
    elif kind == "cut":
        del data[at:]
    elif kind == "run":
        data[at:at] = chance.choice((b"\0", b"\xff", b"\xff\xd0", b"\0\0\0\0IDAT", chance.randbytes(7))) * chance.choice((1, 50, 2000))
    elif kind == "splice":
        other = chance.choice(files)
        data[at:] = other[chance.randrange(len(other)) :]
    elif kind == "head":  # of another file, maybe of another format
        count = chance.choice((8, 32, 200))
        data[:count] = chance.choice(files)[:count]
    elif parts.spans:
        start, end = chance.choice(parts.spans)
        if kind == "drop":
            del data[start:end]
        elif kind == "swap":
            other_start, other_end = chance.choice(parts.spans)
            data[start:end] = data[other_start:other_end]
        else:
            times = 1 if kind == "repeat" else chance.choice((5, 300, 5000))
            data[end:end] = data[start:end] * min(times, 1 + 2_000_000 // (end - start))
