"""The in-process limit: how fast this machine decodes photos and runs the model with no server around them.

Decode alone, forward alone, both side by side, and one image at a time, over the ways to do each. Every figure is measured by one
loop: a few lanes (threads), each of which decodes a batch straight into a model's input, starts the forward, and goes on with the
next batch while that runs. Nothing is handed from thread to thread, nothing is copied twice.
"""

import argparse
import ctypes
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.load import ROOT, Figures, busy_seconds, cores, gather, machine, say
from models.checkpoint import read_header
from models.preprocessing import Preprocessing
from service import conversion

conversion.refuse_telemetry()
import openvino  # noqa: E402  # not before telemetry is refused

BATCHES = (1, 2, 4, 8, 16)
OPENVINO_PRECISION = {"bf16": "bf16", "fp32": "f32"}
FINALISTS = 3  # ways that looked best once, and are then measured again in turn


@dataclass(frozen=True)
class Way:
    """One way to do the work."""

    kind: str  # decode, forward, overlapped, single (an image at a time, as quick as can be), sequential (the same on one thread)
    engine: str = ""  # openvino, torch, or none: decode alone
    precision: str = ""
    streams: int = 1  # forwards side by side
    threads: int = 1  # of each forward
    batch: int = 1
    fixed: bool = False  # compiled for this batch size alone
    lanes: int = 1  # threads that decode and start forwards
    ahead: int = 0  # batches of a lane that are computed while it decodes the next; 0: it waits for each

    def __str__(self) -> str:
        if not self.engine:
            return f"{self.kind}: {self.lanes} threads"
        shape = "fixed" if self.fixed else "any"
        model = f"{self.engine} {self.precision}, {self.streams} x {self.threads} threads, batch {self.batch} ({shape} shape)"
        return f"{self.kind}: {model}, {self.lanes} lanes, {self.ahead} ahead"


class Place(Protocol):
    """Room for one batch, and the forward of what lies in it."""

    pixels: npt.NDArray[np.uint8]

    def start(self) -> None: ...
    def wait(self) -> None: ...
    def run(self) -> None:
        """Both at once: a little quicker than one after the other."""


class _NoModel:
    """For decoding alone."""

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self.pixels = pixels

    def start(self) -> None:
        pass

    wait = run = start


class _OpenVino:
    def __init__(self, pixels: npt.NDArray[np.uint8], compiled: Any) -> None:
        self.pixels = pixels
        request = compiled.create_infer_request()
        request.set_input_tensor(openvino.Tensor(pixels, shared_memory=True))
        self.start, self.wait, self.run = request.start_async, request.wait, request.infer


class _Torch:
    """Eager torch, as the server's other engine runs it: half precision in channels_last, the softmax in float32."""

    def __init__(self, pixels: npt.NDArray[np.uint8], model: Any, preprocessing: Preprocessing, precision: str) -> None:
        import torch

        from models.architectures import DTYPES

        self.pixels = pixels
        inputs = torch.from_numpy(pixels)

        @torch.inference_mode()
        def run() -> None:
            model(preprocessing.normalize(inputs, DTYPES[precision])).float().softmax(1)

        self.start = self.run = run

    def wait(self) -> None:
        pass


class Limit:
    """One checkpoint and its photos, measured in any way."""

    def __init__(self, checkpoint: Path, photos: Sequence[bytes], cache_dir: Path) -> None:
        self.checkpoint, self.photos, self.cache_dir = checkpoint, photos, cache_dir
        self.preprocessing = read_header(checkpoint).preprocessing

    # The last one alone is kept: each has its own copy of the weights.
    @lru_cache(maxsize=1)  # noqa: B019  # there is one Limit in a process
    def _compiled(self, precision: str, streams: int, threads: int, batch: int | None) -> Any:
        core = openvino.Core()
        model = core.read_model(conversion.ensure(self.checkpoint, self.cache_dir))
        if batch is not None:
            model.reshape([batch, *model.input(0).partial_shape[1:]])
        options = {"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": streams * threads, "ENABLE_CPU_PINNING": False}
        return core.compile_model(model, "CPU", options | {"INFERENCE_PRECISION_HINT": OPENVINO_PRECISION[precision]})

    @lru_cache(maxsize=1)  # noqa: B019  # likewise
    def _torch(self, precision: str) -> Any:
        import torch

        from models import architectures, checkpoint

        model = checkpoint.load(self.checkpoint).model
        return architectures.place(model, torch.device("cpu"), architectures.DTYPES[precision])

    def _places(self, way: Way) -> Callable[[], Place]:
        shape = (way.batch, self.preprocessing.crop, self.preprocessing.crop, 3)
        if way.engine == "openvino":
            compiled = self._compiled(way.precision, way.streams, way.threads, way.batch if way.fixed else None)
            return lambda: _OpenVino(np.zeros(shape, np.uint8), compiled)
        if way.engine == "torch":
            import torch

            torch.set_num_threads(way.threads)
            model = self._torch(way.precision)
            return lambda: _Torch(np.zeros(shape, np.uint8), model, self.preprocessing, way.precision)
        return lambda: _NoModel(np.zeros(shape, np.uint8))

    def measure(self, way: Way, seconds: float) -> Figures:
        """images_per_s, cpu_ms_per_image of this process, p50_ms of a lane's turn (one batch), others_percent of the machine."""
        make, turn = self._places(way), itertools.count()
        took: list[list[float]] = [[] for _ in range(way.lanes)]
        ready, end = threading.Barrier(way.lanes + 1), 0.0
        failed: list[BaseException] = []

        def lane(mine: list[float]) -> None:
            try:
                places = [make() for _ in range(max(1, way.ahead))]
                for place in places:
                    place.run()  # the first forward of a shape, and in a thread, takes long
                ready.wait()
                ready.wait()
                for place in itertools.cycle(places):
                    if (begun := time.perf_counter()) >= end:
                        break
                    place.wait()
                    for row in range(way.batch if way.kind != "forward" else 0):
                        place.pixels[row] = self.preprocessing.read(self.photos[next(turn) % len(self.photos)])
                    if way.ahead:
                        place.start()
                    else:
                        place.run()
                    mine.append(time.perf_counter() - begun)
                for place in places:
                    place.wait()
            except BaseException as error:  # or the others would wait for it for ever
                failed.append(error)
                ready.abort()

        threads = [threading.Thread(target=lane, args=(mine,)) for mine in took]
        for thread in threads:
            thread.start()
        try:
            ready.wait()
            busy, cpu, begun = busy_seconds(), time.process_time(), time.perf_counter()
            end = begun + seconds
            ready.wait()
        except threading.BrokenBarrierError:
            pass
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        lasted, cpu, busy = time.perf_counter() - begun, time.process_time() - cpu, busy_seconds() - busy
        images = way.batch * sum(map(len, took))
        return {
            "images_per_s": images / lasted,
            "cpu_ms_per_image": 1000 * cpu / images,
            "p50_ms": 1000 * statistics.median(itertools.chain(*took)),
            "others_percent": 100 * (busy - cpu) / lasted / cores(),
        }


Samples = dict[Way, list[Figures]]


def best(samples: Samples, kind: str) -> Way:
    """The way of a kind with the best median: the shortest turn for one image at a time, else the most images."""
    return ranked(samples, kind)[0]


def ranked(samples: Samples, kind: str) -> list[Way]:
    """All ways of a kind, the best first. Those measured most often stand before those that were tried once."""

    def badness(way: Way) -> tuple[int, float]:
        found = samples[way]
        if kind == "single":
            return -len(found), statistics.median(figures["p50_ms"] for figures in found)
        return -len(found), -statistics.median(figures["images_per_s"] for figures in found)

    return sorted((way for way in samples if way.kind == kind), key=badness)


def splits() -> list[tuple[int, int]]:
    """Streams and threads of each: one of all cores, or one core for each, where no thread waits for the slowest of its team."""
    return sorted({(1, cores()), (cores(), 1)})


def forwards(engines: Iterable[str], precisions: Iterable[str]) -> list[Way]:
    """All forward-only ways. OpenVINO's requests are queued, so that no stream waits for us; torch computes in the thread that asks."""
    found = []
    for engine, precision, (streams, threads), batch in itertools.product(engines, precisions, splits(), BATCHES):
        way = Way("forward", engine, precision, streams, threads, batch, lanes=streams)
        queued = replace(way, lanes=1, ahead=2 * streams)
        found += [way] if engine == "torch" else [queued, replace(queued, fixed=True)]
    return found


def overlaps(engines: Iterable[str], precisions: Iterable[str], fixed: bool) -> list[Way]:
    """The sensible combinations of streams, lanes and batch size, with decoding beside the forward."""
    many, found = cores(), []
    for engine, precision, batch in itertools.product(engines, precisions, BATCHES[:4]):
        way = Way("overlapped", engine, precision, many, 1, batch, fixed and engine == "openvino", many)
        found.append(way)  # each lane decodes, then computes: nobody waits for anybody
        if engine == "openvino":
            lanes = sorted({max(1, many // 2), many, many + 1})
            found += [replace(way, streams=s, threads=t, lanes=n, ahead=2) for (s, t), n in itertools.product(splits(), lanes)]
    return found


def singles(engines: Iterable[str], precisions: Iterable[str]) -> list[Way]:
    """One image at a time: on all cores or on one."""
    ways = [Way("single", *rest) for rest in itertools.product(engines, precisions, (1,), sorted({1, cores()}))]
    return ways + [replace(way, fixed=True) for way in ways if way.engine == "openvino"]


def words(figures: Figures) -> str:
    """The figures of one sample in a line."""
    return "{images_per_s:.1f} images/s, {cpu_ms_per_image:.2f} CPU ms/image, {p50_ms:.2f} ms a turn, others {others_percent:.0f} %".format(
        **figures
    )


def survey(limit: Limit, engines: Sequence[str], precisions: Sequence[str], seconds: float, rounds: int) -> Samples:
    """Tries every way once, then the best ones again in turn."""
    samples: Samples = {}

    def sample(ways: Iterable[Way]) -> None:
        for way in ways:
            samples.setdefault(way, []).append(figures := limit.measure(way, seconds))
            say(f"{way}: {words(figures)}")

    many = cores()
    sample(Way("decode", lanes=lanes) for lanes in sorted({1, many, 2 * many}))
    sample(forwards(engines, precisions))
    quickest = best(samples, "forward")
    sample(overlaps(engines, precisions, quickest.fixed))
    sample(singles(engines, precisions))
    overlapped, single = ranked(samples, "overlapped")[:FINALISTS], ranked(samples, "single")[:FINALISTS]
    sequential = Way("sequential", quickest.engine, quickest.precision, fixed=quickest.fixed)
    again = [*overlapped, *single, sequential, *(replace(quickest, batch=batch) for batch in BATCHES[:3])]
    for number in range(rounds):
        sample(reversed(again) if number % 2 else again)
    return samples


def summary(samples: Samples) -> dict[str, Any]:
    """The best way of each kind with the medians of its figures, and what an image costs in the quickest forward by batch size."""
    found: dict[str, Any] = {}
    for kind in ("decode", "forward", "overlapped", "single", "sequential"):
        way = best(samples, kind)
        medians = {name: statistics.median(figures[name] for figures in samples[way]) for name in samples[way][0]}
        found[kind] = {"way": asdict(way), "words": str(way), **medians}
    forward = Way(**found["forward"]["way"])
    costs = {batch: samples[replace(forward, batch=batch)] for batch in BATCHES}
    found["forward"]["cpu_ms_by_batch"] = {
        batch: statistics.median(one["cpu_ms_per_image"] for one in many) for batch, many in costs.items()
    }
    return found


def table(found: dict[str, Any]) -> str:
    """The summary as Markdown."""
    lines = ["| best | images/s | CPU ms/image | p50 ms, one image |", "|---|---|---|---|"]
    for kind, one in found.items():
        p50 = f"{one['p50_ms']:.2f}" if kind in ("single", "sequential") else ""
        lines.append(f"| {one['words']} | {one['images_per_s']:.1f} | {one['cpu_ms_per_image']:.2f} | {p50} |")
    costs = ", ".join(f"{batch}: {cost:.2f}" for batch, cost in found["forward"]["cpu_ms_by_batch"].items())
    return "\n".join([*lines, "", f"CPU ms of an image's forward by batch size: {costs}"])


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limit", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument("--photos", type=Path, default=ROOT / "examples", help="folder of JPEG, PNG or WebP files")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    parser.add_argument("--seconds", type=float, default=2, help="of each sample")
    parser.add_argument("--rounds", type=int, default=5, help="how often the best ways are measured again")
    parser.add_argument("--engines", nargs="+", choices=("openvino", "torch"), default=["openvino", "torch"])
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), help="default: what this CPU has instructions for")
    parser.add_argument("--cache-dir", type=Path, help="keep the converted model here")
    parser.add_argument("--again", type=Path, help="measure only the best ways that an earlier --json found, once each")
    options = parser.parse_args()
    if not options.checkpoint.is_file():
        parser.error(f"no checkpoint at {options.checkpoint}")
    # Memory that a forward frees stays with the process: else eager torch spends a third of its time having pages zeroed again.
    for name, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**28)):  # no mmap, never trim, grow in large steps
        ctypes.CDLL(None).mallopt(name, value)
    facts = machine()
    say(json.dumps(facts))
    photos = [photo.data for photo in gather(options.photos)]
    precisions = options.precisions or (["bf16", "fp32"] if facts["bf16"] else ["fp32"])
    with tempfile.TemporaryDirectory(prefix="limit-") as folder:
        limit = Limit(options.checkpoint, photos, options.cache_dir or Path(folder))
        if options.again:
            ways = [Way(**one["way"]) for one in json.loads(options.again.read_text())["best"].values()]
            ways = [way for way in ways if way.kind in ("overlapped", "single", "sequential")]
            samples = {way: [limit.measure(way, options.seconds)] for way in ways}
            found: dict[str, Any] = {way.kind: samples[way][0] for way in ways}
            for way in ways:
                say(f"{way}: {words(samples[way][0])}")
        else:
            count = len(forwards(options.engines, precisions)) + len(overlaps(options.engines, precisions, False))
            say(f"this takes about {1 + (count + 10 * (1 + options.rounds)) * (options.seconds + 0.5) / 60:.0f} minutes")
            samples = survey(limit, options.engines, precisions, options.seconds, options.rounds)
            found = summary(samples)
            print(table(found))
    if options.json:
        every = [{"way": asdict(way), "samples": many} for way, many in samples.items()]
        settings = {"seconds": options.seconds, "rounds": options.rounds, "checkpoint": options.checkpoint.name}
        options.json.write_text(json.dumps({"machine": facts, "settings": settings, "best": found, "samples": every}, indent=1))


if __name__ == "__main__":
    main()
