"""Feeds the decoder, and then the server, mutated image files, and exits 1 where either does what it must not.

    photos -> subjects: every format, coding and mode that matters -> mutated(seed, number): cut, flipped, spliced, lengths and counts
    that lie -> Preprocessing.read in several threads of a process of its own -> pixels or an ImageError of a known code
             -> POST /predict as raw, multipart and JSON bodies -> 200 or a 4xx

A file is known by its number: `--make SEED:NUMBER` writes it to the standard output, so that what was slow or crashed can be made again.
"""

import argparse
import base64
import ctypes
import faulthandler
import gc
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import struct
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import load
from benchmarks.load import ROOT, say
from benchmarks.serving import OURS, SERVERS
from models.checkpoint import read_header
from models.images import ImageError
from service.machine import give_large_back, share_heap

CODES = {"not_an_image", "unsupported_format", "image_too_large", "image_corrupt"}
LIMIT_S = 10.0  # CPU time that one file may take: as long as a request may
GROWTH_PERCENT = 3.0
READINGS = 50  # of memory, spread over all files after the warm-up, which is as many again: by then a small process has settled
THREADS = 4

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


# In process


@dataclass
class Found:
    """What became of the files of one run."""

    answers: Counter[str] = field(default_factory=Counter)  # by code or HTTP status
    wrong: list[str] = field(default_factory=list)
    slowest: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, number, bytes; the longest first
    memory_mb: list[float] = field(default_factory=list)  # READINGS of them
    peak_mb: float = 0.0  # of the decoding process

    @property
    def floors_mb(self) -> tuple[float, float]:
        """The least memory in the first fifth of the readings, and in the last one.

        The least, since the heap keeps some of what the last pictures took until others need it: that comes and goes, and what leaks
        stays.
        """
        fifth = READINGS // 5
        return min(self.memory_mb[:fifth]), min(self.memory_mb[-fifth:])

    @property
    def growth_percent(self) -> float:
        before, after = self.floors_mb
        return 100 * (after / before - 1)

    def add(self, answer: str, seconds: float, number: int, size: int) -> None:
        self.answers[answer] += 1
        self.slowest = sorted([*self.slowest, (seconds, number, size)], reverse=True)[:5]


def _parted(count: int) -> list[range]:
    """The numbers of the warm-up, and then 0 to `count` in READINGS parts."""
    ends = [count * part // READINGS for part in range(READINGS + 1)]
    return [range(count, 2 * count), *itertools.starmap(range, itertools.pairwise(ends))]


def in_process(read: Callable[[bytes], Any], files: Sequence[bytes], seed: int, count: int, nows: Sequence[Any]) -> Found:
    """Reads `count` mutated files in as many threads as there are `nows`, which tell whoever outlives a crash what number each is at."""
    found, lock = Found(), threading.Lock()

    def read_all(numbers: Iterator[int], now: Any) -> None:
        for number in numbers:
            now.value = number
            data, begun = mutated(files, seed, number), time.thread_time()
            try:
                read(data)
                answer = "decoded"
            except ImageError as error:
                answer = error.code
            except BaseException as error:  # whatever it is, it must not come out
                answer = repr(error)
            seconds = time.thread_time() - begun
            with lock:
                found.add(answer, seconds, number, len(data))
                if answer not in {"decoded"} | CODES:
                    found.wrong.append(f"{seed}:{number}: {answer}")
                if seconds > LIMIT_S:
                    found.wrong.append(f"{seed}:{number}: {seconds:.1f} s of CPU time")

    with ThreadPoolExecutor(len(nows)) as pool:
        for part in _parted(count):
            list(pool.map(read_all, itertools.repeat(iter(part)), nows))  # each thread takes the next number
            gc.collect()  # so that what is read is in use
            ctypes.CDLL(None).malloc_trim(0)
            found.memory_mb.append(load.memory_mb([os.getpid()]))
    del found.memory_mb[0]
    found.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _child(read: Callable[[bytes], Any], files: Sequence[bytes], seed: int, count: int, nows: Sequence[Any], out: Any) -> None:
    faulthandler.enable()
    share_heap()  # these two as a front door does
    give_large_back()
    out.send(in_process(read, files, seed, count, nows))


def in_a_child(read: Callable[[bytes], Any], files: Sequence[bytes], seed: int, count: int) -> Found:
    """`in_process` in a process of its own, whose crash is told with the files that it was at."""
    context = multiprocessing.get_context("spawn")
    nows = [context.Value("q", -1, lock=False) for _ in range(THREADS)]
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(read, files, seed, count, nows, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        found: Found = ours.recv()
    except EOFError:
        process.join()
        found = Found(wrong=[f"the process died (exit code {process.exitcode}) at one of {[f'{seed}:{now.value}' for now in nows]}"])
    process.join()
    return found


# Over HTTP


def request(data: bytes, number: int) -> load.Body:
    """A raw, multipart or JSON body in turn; what the raw one says of its type is mostly wrong."""
    if number % 3 == 0:
        return ("image/png", "application/octet-stream", "text/plain")[number // 3 % 3], data
    if number % 3 == 1:
        return load.request_body(load.Photo("photo", data), "multipart")
    return "application/json", json.dumps({"image": base64.b64encode(data).decode()}).encode()


def over_http(predict: str, leader: int, files: Sequence[bytes], seed: int, count: int) -> Found:
    """Posts `count` mutated files to the server whose first process is `leader`: its processes must stay and its memory, too."""
    found, lock, before = Found(), threading.Lock(), set(load.family(leader))

    def post(number: int) -> None:
        content_type, body = request(mutated(files, seed, number), number)
        message, begun = "", time.monotonic()
        try:
            asked = urllib.request.Request(predict, data=body, headers={"Content-Type": content_type})
            with load.HTTP.open(asked, timeout=load.PATIENCE_S) as answer:
                status = str(answer.status)
        except urllib.error.HTTPError as error:
            status, message = str(error.code), error.read(500).decode(errors="replace")
        except OSError as error:
            status = repr(error)
        with lock:
            found.add(status, time.monotonic() - begun, number, len(body))
            if status not in {"200", "400", "413", "415", "422"}:
                found.wrong.append(f"{seed}:{number}: {status} {message.strip()}")

    with ThreadPoolExecutor(2 * THREADS) as pool:
        for numbers in _parted(count):
            list(pool.map(post, numbers))
            found.memory_mb.append(load.memory_mb(load.family(leader)))
    del found.memory_mb[0]
    if (after := set(load.family(leader))) != before:
        found.wrong.append(f"processes {sorted(before - after)} are gone, {sorted(after - before)} have come")
    return found


# Report


def report(name: str, found: Found, seed: int) -> bool:
    """Prints what became of one run's files, and whether that is as it must be."""
    print(f"{name}, seed {seed}: {sum(found.answers.values())} files")
    for answer, count in found.answers.most_common():
        print(f"  {answer:20} {count:7}")
    if found.memory_mb:
        before, after = found.floors_mb
        peak = f", at most {found.peak_mb:.0f}" if found.peak_mb else ""
        growth = f"growth {found.growth_percent:.2f} % (less than {GROWTH_PERCENT:g})"
        print(f"  MB after the warm-up {before:.1f}, in the end {after:.1f}, readings up to {max(found.memory_mb):.1f}{peak}; {growth}")
    print("  slowest: " + ", ".join(f"{seed}:{number} {1000 * seconds:.0f} ms, {size} bytes" for seconds, number, size in found.slowest))
    for line in found.wrong[:20]:
        print(f"  WRONG {line}")
    return not found.wrong and (not found.memory_mb or found.growth_percent < GROWTH_PERCENT)


def photos(folder: Path) -> list[bytes]:
    """The examples, which are small in number and in bytes, and the photos of a folder."""
    return [photo.data for photo in (*load.gather(ROOT / "examples"), *(load.gather(folder) if folder != ROOT / "examples" else ()))]


def main() -> None:
    """Reads the command line, drives the decoder and the server, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument("--photos", type=Path, default=ROOT / "examples", help="folder of JPEG, PNG or WebP files, besides examples/")
    for name, default in (("--count", 50_000), ("--http", 2_000), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--make", metavar="SEED:NUMBER", help="write this file to the standard output and do nothing else")
    options = parser.parse_args()
    files = subjects(photos(options.photos))
    if options.make:
        sys.stdout.buffer.write(mutated(files, *map(int, options.make.split(":"))))
        return
    say(f"{len(files)} whole files, of {min(map(len, files))} to {max(map(len, files))} bytes")
    good = True
    if options.count:
        read = read_header(options.checkpoint).preprocessing.read
        good = report("in process", in_a_child(read, files, options.seed, options.count), options.seed)
    if options.http:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            with load.running(SERVERS[OURS], options.checkpoint, Path(folder)) as live:
                found = over_http(live.base + live.server.predict, live.pid, files, options.seed, options.http)
            good &= report("over HTTP", found, options.seed)
    sys.exit(not good)


if __name__ == "__main__":
    main()
