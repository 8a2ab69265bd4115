"""For benchmarks/gpu.py: what is measured of one checkpoint. Each part adds its rows as it goes, for its time may run out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_report import Row, Skipped, alternate, cell, overlap_row, table, throughput_row
from benchmarks.load import say

if TYPE_CHECKING:  # a host may lack what one of them needs: each part imports what it takes
    import torch

    from benchmarks.gpu_pipeline import Threads, WithWorker
    from service.torch_engine import TorchEngine

FROM_BATCH = 32  # the ratio is required from here on
OVERLAP_BATCHES = 50
COPIES_S = 0.1  # of each sample
SERVED = ("litserve", "fastapi", "fastapi_offline", "uvicorn", "pydantic_settings", "python_multipart")


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    sizes: tuple[int, ...] = (1, 8, 32, 64, 128)
    rounds: int = 5
    sample_s: float = 0.4
    served_s: int = 10
    concurrency: tuple[int, ...] = (64, 256)


SMOKE = Scale((1, 8), 3, 0.1, 1, (4,))  # on a CPU: only to see that all of it runs


@dataclass
class Subject:
    """One checkpoint on one device, with the engine that the parts share."""

    path: Path
    device: torch.device
    scale: Scale
    photos: Path
    folder: Path
    pipeline: Threads | WithWorker
    engine: TorchEngine | None = None

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def build(self, precision: str, largest: int) -> TorchEngine:
        from models import checkpoint
        from service.torch_engine import TorchEngine

        options = {"max_batch_size": largest, "compiled": False, "cache_dir": self.folder, "threads": 1}
        engine = TorchEngine(checkpoint.load(self.path), str(self.device), precision=precision, **options)  # type: ignore[arg-type]
        while engine.warm_next():
            pass
        return engine

    def need(self) -> TorchEngine:
        """The engine of the server's default precision, in the pipeline."""
        if self.engine is None:
            self.engine = self.build("auto", max(FROM_BATCH, *self.scale.sizes))
            self.pipeline.attach(self.engine)
        return self.engine

    def need_cuda(self) -> TorchEngine:
        if not self.on_cuda:
            raise Skipped("there are no copies to a device on a CPU")
        return self.need()

    def release(self) -> None:
        """Free the device's memory, which an engine and its lanes, who know each other, else keep for a while."""
        import torch

        self.pipeline.detach()
        self.engine = None
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def golden(subject: Subject, rows: list[Row]) -> None:
    """The golden samples in each precision at batch 1 and 32, replayed from a graph and launched one by one; the memory it took."""
    import torch

    for asked in ("fp16", "bf16", "fp32", "auto"):
        subject.release()
        begun = time.monotonic()
        engine = subject.need() if asked == "auto" else subject.build(asked, 32)
        first: Row = {"start s": time.monotonic() - begun, "largest batch": engine.largest}
        if subject.on_cuda:
            first["peak MB"] = torch.cuda.max_memory_allocated(subject.device) / 1e6
            first["reserved MB"] = torch.cuda.max_memory_reserved(subject.device) / 1e6
        if asked in ("auto", engine.precision):
            graphs = engine._graphs
            for size in (1, 32):
                for kept in [graphs, {}] if graphs else [graphs]:
                    engine._graphs = kept
                    rows.append({"asked": asked, "got": engine.precision, "batch": size, "graph": size in kept})
                    rows[-1] |= _parity(subject, engine, size, required=asked == "auto") | first
                    first = {}
            engine._graphs = graphs
        if asked == "auto" and subject.on_cuda and 32 in engine.warm:
            torch.backends.cudnn.benchmark = True
            engine._prepare(32)
            rows.append({"asked": "auto, cudnn.benchmark", "got": engine.precision, "batch": 32, "graph": 32 in engine._graphs})
            rows[-1] |= _parity(subject, engine, 32, required=False)
            torch.backends.cudnn.benchmark = False
            engine._prepare(32)  # as it was
        if asked == "auto" or asked != engine.precision:
            rows.append({"asked": asked, "got": engine.precision, "figures": engine.why, **first})
        say(f"{asked}: {engine.why}")
        del engine


def _parity(subject: Subject, engine: TorchEngine, size: int, required: bool) -> Row:
    """How the golden samples come out in batches of one size, and how fast. A size that is not warm is never served."""
    import numpy as np

    from models.checkpoint import BOUNDS, fidelity

    if size not in engine.warm:
        return {"figures": "not used: too large, or it misses the golden samples"} | ({"ok": False} if required else {})
    engine.fill(engine.lanes[0], size)
    found = engine.lanes[0].run(0, size).probabilities if size > 1 else _one_by_one(engine)
    rows = np.arange(len(found)) % len(engine.golden.pixels)
    good, figures = fidelity(found, engine.golden.probabilities[rows], BOUNDS[engine.precision])
    return {"images/s": forward_rate(engine, size, subject.scale.sample_s / 2), ("ok" if required else "within"): good, "figures": figures}


def _one_by_one(engine: TorchEngine) -> Any:
    import numpy as np

    found = []
    for pixels in engine.golden.pixels:
        engine.lanes[0].put(0, pixels)
        found.append(engine.lanes[0].run(0, 1).probabilities.copy())
    return np.concatenate(found)


def forward_rate(engine: TorchEngine, size: int, seconds: float) -> float:
    """Images a second of forwards back to back on pixels that lie on the device already: what no pipeline can exceed."""
    import numpy as np
    import torch

    with torch.inference_mode(), engine.computing():
        rows = np.arange(size) % len(engine.golden.pixels)
        pixels = torch.from_numpy(engine.golden.pixels[rows]).to(engine.device)

        def timed(count: int) -> float:
            if not engine.on_cuda:
                begun = time.perf_counter()
                for _ in range(count):
                    engine.replay(pixels)
                return time.perf_counter() - begun
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                engine.replay(pixels)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        count = max(3, round(seconds / (timed(5) / 5)))
        return float(size * count / timed(count))


def throughput(subject: Subject, rows: list[Row]) -> None:
    """The forward alone beside the pipeline, in turn, for each batch size."""
    engine, scale = subject.need(), subject.scale
    for size in scale.sizes:
        if size not in engine.warm:
            rows.append({"batch": size, "figures": "not used: too large, or it misses the golden samples", "ok": False})
            continue
        found = [subject.pipeline.sample(size, scale.sample_s)]  # once before, so that clocks and caches are those of the rest

        def forward(size: int = size) -> float:
            return forward_rate(engine, size, scale.sample_s)

        def pipeline(size: int = size, found: list[dict[str, float]] = found) -> float:
            found.append(subject.pipeline.sample(size, scale.sample_s))
            return found[-1]["images_per_s"]

        forwards, pipelines = alternate(forward, pipeline, scale.rounds)
        more: Row = {key: int(sum(one[key] for one in found)) for key in ("wrong", "failed")}
        more |= {"mean batch": statistics.median(one["mean batch"] for one in found), "by": subject.pipeline.name}
        rows.append(throughput_row(size, forwards, pipelines, subject.on_cuda and size >= FROM_BATCH, more))
        say(f"batch {size}: forward {cell(forwards)}, pipeline {cell(pipelines)} images/s, ratio {rows[-1]['ratio']:.3f}")


def copies(subject: Subject, rows: list[Row]) -> None:
    """GB/s of pixels to the device: as the engine puts them, and what one large copy reaches."""
    import numpy as np
    import torch

    engine = subject.need_cuda()
    lane, count = engine.lanes[0], min(32, engine.room)
    slots = subject.pipeline.pixels
    plain = np.array(slots[:count])  # the same pixels where nothing was registered
    target = torch.empty(plain.shape, dtype=torch.uint8, device=engine.device)
    registered = engine._pinned
    torch.cuda.synchronize(engine.device)

    def rate(work: Callable[[], None], size: int) -> float:
        samples: list[float] = []
        for _ in range(subject.scale.rounds):
            repeats, begun = 0, time.perf_counter()
            while time.perf_counter() < begun + COPIES_S:
                work()
                engine.copying.synchronize()
                repeats += 1
            samples.append(repeats * size * plain[0].nbytes / (time.perf_counter() - begun) / 1e9)
        return statistics.median(samples)

    def put(pixels: Any, size: int) -> None:
        for place in range(size):
            lane.put(place, pixels[place])

    def whole(pixels: Any) -> None:
        with torch.cuda.stream(engine.copying):
            target.copy_(torch.from_numpy(pixels), non_blocking=True)

    ways = [("slots, registered", slots[:count], True)] if registered else []
    ways += [("not registered, through the lane's pinned buffer", plain, False), ("not registered, straight", plain, True)]
    try:
        for name, pixels, straight in ways:
            engine._pinned = straight
            row: Row = {"from": name, "1 image, GB/s": rate(lambda pixels=pixels: put(pixels, 1), 1)}  # type: ignore[misc]
            row[f"{count} put by put, GB/s"] = rate(lambda pixels=pixels: put(pixels, count), count)  # type: ignore[misc]
            if straight:
                row[f"{count} in one copy, GB/s"] = rate(lambda pixels=pixels: whole(pixels), count)  # type: ignore[misc]
            rows.append(row)
    finally:
        engine._pinned = registered
    if not registered:
        rows.append({"from": f"slots could not be registered: {engine.transfer}"})


def overlap(subject: Subject, rows: list[Row]) -> None:
    """How much of the copies' time lies under a forward, and how much of the time the device computes."""
    import torch

    engine = subject.need_cuda()
    size = max(size for size in engine.warm if size <= FROM_BATCH)
    marks: dict[str, list[tuple[Any, Any]]] = {"copy": [], "forward": []}

    def marked(kind: str, stream: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*arguments: Any) -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            found = call(*arguments)
            end.record(stream)
            marks[kind].append((start, end))
            return found

        return around

    sample = subject.pipeline.sample
    seconds = OVERLAP_BATCHES * size / max(1.0, sample(size, 0.2)["images_per_s"])
    torch.cuda.synchronize(engine.device)
    zero = torch.cuda.Event(enable_timing=True)
    zero.record(engine.compute)
    try:
        for lane in engine.lanes:
            setattr(lane, "put", marked("copy", engine.copying, lane.put))  # noqa: B010  # mypy: a method
        setattr(engine, "replay", marked("forward", engine.compute, engine.replay))  # noqa: B010
        found = sample(size, seconds)
    finally:
        for thing, name in [*((lane, "put") for lane in engine.lanes), (engine, "replay")]:
            thing.__dict__.pop(name, None)
    torch.cuda.synchronize(engine.device)
    spans = {kind: [(zero.elapsed_time(start), zero.elapsed_time(end)) for start, end in pairs] for kind, pairs in marks.items()}
    rows.append(overlap_row(size, spans["copy"], spans["forward"]) | {"images/s": found["images_per_s"]})


def served(subject: Subject, rows: list[Row]) -> None:
    """The real server, driven with photos."""
    from benchmarks import load
    from benchmarks.gpu_client import drive

    if missing := [name for name in SERVED if find_spec(name) is None]:
        raise Skipped(f"the server needs {', '.join(missing)}")
    subject.release()
    command = f"{{python}} -m service --checkpoint {{checkpoint}} --port {{port}} --host 127.0.0.1 --device {subject.device} --engine torch"
    server = load.Server("spyglass", command, "/readyz", "/predict", {"SPYGLASS_CACHE_DIR": "{folder}/cache"}, info="/info")
    bodies = [load.request_body(photo, server.body) for photo in load.gather(subject.photos)]
    with load.running(server, subject.path, subject.folder) as live:
        say(f"ready after {live.ready_s:.1f} s: {live.workers()[0]['why']}")
        drive(live, bodies, subject.folder, max(subject.scale.concurrency), max(1, subject.scale.served_s // 4))  # the sizes get warm
        for concurrency in subject.scale.concurrency:
            live.classify(bodies[0])
            before, cpu = live.workers()[0], sum(load.family(live.pid).values())
            run = drive(live, bodies, subject.folder, concurrency, subject.scale.served_s)
            cpu, after = sum(load.family(live.pid).values()) - cpu, live.workers()[0]
            row: Row = {"at once": concurrency, "images/s": (run["requests"] - run["non_2xx"]) / run["seconds"]}
            row |= {"p50 ms": run["p50_ms"], "p99 ms": run["p99_ms"]}
            row["mean batch"] = (after["images"] - before["images"]) / max(1, after["batches"] - before["batches"])
            row |= {"CPUs used": cpu / run["seconds"], "non-2xx": run["non_2xx"], "errors": run["errors"], "load from": run["by"]}
            rows.append(row | {"ok": run["requests"] > 0 and not run["non_2xx"] + run["errors"]})
            say(f"{concurrency} at once: {table(rows[-1:])}")


PARTS: dict[str, tuple[Callable[[Subject, list[Row]], None], float]] = {  # each with its share of the time
    "golden": (golden, 45),
    "throughput": (throughput, 55),
    "copies": (copies, 8),
    "overlap": (overlap, 12),
    "served": (served, 55),
}
