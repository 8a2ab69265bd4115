"""Measures Spyglass beside other servers of the same model, and beside what the machine can do with no server around the model.

Every round starts each server afresh, warms it, drives it with `wrk` and stops it, and the next round goes the other
way round. Only one server lives at a time: LitServe's loop spins while idle and would cost its neighbour a core, and
freezing it (SIGSTOP) is no way out: a server that watches its workers' heartbeats takes them for dead when it thaws.
A restart costs seconds, treats all servers alike, shares no memory or device, and makes the rounds independent.
The in-process limit (benchmarks/limit.py) is measured in the same rounds. Exits 1 when a requirement is not met.
"""

import argparse
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import load, report
from benchmarks.load import ROOT, STOPPING, Figures, Live, Photo, Server, say
from models.checkpoint import CheckpointError, read_header

CROWD, FEW = 64, 4  # requests at once besides --concurrency and one: small photos, and 12-megapixel ones
AGREEMENT = 0.8  # of top-1: preprocessing and precision may tip a close call, a wrong model or label list far more
SURE = 0.5  # a photo whose best label is below that is such a close call
SOAK = (2_000, 20_000)  # requests before the first look at the memory, and between the two looks

OURS = "spyglass"
START = "--checkpoint {checkpoint} --port {port}"
PEERS = {  # each with the options that it needs besides
    "quickstart": ("quickstart", ""),
    "fastapi-torch": ("fastapi_torch", ""),
    "fastapi-onnx": ("fastapi_onnx", " --onnx {folder}/model.onnx"),
}
# All get the identical multipart bytes, the form that LitServe documents for files: so the figures differ by the servers and
# not by what they were sent. `--ours-raw` shows what the plain body that Spyglass also takes is worth.
SERVERS = {
    OURS: Server(
        OURS,
        f"{{python}} -m service {START} --host 127.0.0.1",
        "/readyz",
        "/predict",
        environment={"SPYGLASS_CACHE_DIR": "{folder}/cache"},
        info="/info",
    ),
} | {
    name: Server(
        name,
        f"{{python}} -m benchmarks.{module} {START} --workers {{workers}}{more}",
        "/health",
        "/predict",
        environment={"OMP_NUM_THREADS": "{threads}"},
        tuned=True,
    )
    for name, (module, more) in PEERS.items()
}


@dataclass(frozen=True)
class Bench:
    """What a run measures with."""

    checkpoint: Path
    folder: Path
    photos: Sequence[Photo]
    big: Sequence[Photo]
    concurrency: int
    seconds: int

    @property
    def short(self) -> int:
        """Seconds of the less important measurements."""
        return max(1, self.seconds // 2)

    def scripts(self, kind: str) -> tuple[Path, Path]:
        """For wrk: the photos, and the big ones."""
        every = (("small", self.photos), ("big", self.big))
        small, big = (
            load.write_script([load.request_body(photo, kind) for photo in photos], self.folder / f"{name}-{kind}")
            for name, photos in every
        )
        return small, big

    def running(self, server: Server) -> Any:
        """The server, started."""
        return load.running(server, self.checkpoint, self.folder)


def done(workers: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Images and batches of all workers together."""
    return sum(one["images"] for one in workers), sum(one["batches"] for one in workers)


def measure(live: Live, bench: Bench) -> Figures:
    """Warms the server, then drives it: at `concurrency`, with a crowd, with one request at a time, and with big photos."""
    small, big = bench.scripts(live.server.body)
    body = load.request_body(bench.photos[0], live.server.body)
    load.drive(live, small, bench.concurrency, max(2, bench.seconds // 3))
    live.classify(body)  # waits behind what the warm-up left in the queue
    workers, before = live.workers(), load.cpu_seconds(live.pid)
    main = load.drive(live, small, bench.concurrency, bench.seconds)
    cpu, others = (after - start for start, after in zip(before, load.cpu_seconds(live.pid), strict=True))
    (images, batches), (images_before, batches_before) = done(live.workers()), done(workers)
    # What wrk drops at its end has cost the server, too: with a heavy model its own count is right, and the answers are too few.
    computed = images - images_before if batches > batches_before else max(main["requests"] - main["non_2xx"], 1)
    live.classify(body)
    crowd = load.drive(live, small, CROWD, bench.short)
    live.classify(body)
    alone = load.drive(live, small, 1, bench.short)
    load.drive(live, big, FEW, 1)
    live.classify(body)
    large = load.drive(live, big, FEW, bench.short)

    def rate(run: Figures) -> float:
        return (run["requests"] - run["non_2xx"]) / run["seconds"]

    return {
        "images_per_s": rate(main),
        **{key: main[key] for key in ("p50_ms", "p99_ms")},
        **{f"alone_{key}": alone[key] for key in ("p50_ms", "p99_ms")},
        **{"crowd_images_per_s": rate(crowd), "crowd_p99_ms": crowd["p99_ms"]},
        **{"big_images_per_s": rate(large), "big_p99_ms": large["p99_ms"]},
        "cpu_ms_per_image": 1000 * cpu / computed,
        "memory_mb": load.memory_mb(load.family(live.pid)),
        "ready_s": live.ready_s,
        **({"mean_batch": (images - images_before) / (batches - batches_before)} if batches > batches_before else {}),
        **{key: sum(run[key] for run in (main, crowd, alone, large)) for key in ("non_2xx", "errors")},
        "others_percent": 100 * others / main["seconds"] / load.cores(),
    }


def search(server: Server, counts: Sequence[int], rate: Callable[[Server], float]) -> Server:
    """The server with the numbers of workers and of threads (of each) that answer most images a second."""
    found: list[tuple[float, Server]] = []
    for workers, threads in itertools.product(counts, counts):
        if workers * threads <= 2 * max(counts):  # more could only stand in one another's way
            one = replace(server, workers=workers, threads=threads)
            found.append((rate(one), one))
            say(f"search {server.name}: {workers} workers, OMP_NUM_THREADS {threads}: {found[-1][0]:.1f} images/s")
    rate_found, best = max(found, key=lambda pair: pair[0])
    if not rate_found:
        say(f"search {server.name}: no answer in that time; give more --seconds")
    return best


def first_rate(server: Server, bench: Bench) -> float:
    """Images a second in a short run, for the search."""
    with bench.running(server) as live:
        small, _ = bench.scripts(server.body)
        load.drive(live, small, bench.concurrency, max(1, bench.seconds // 4))
        run = load.drive(live, small, bench.concurrency, max(2, bench.short))
        return (run["requests"] - run["non_2xx"]) / run["seconds"]


Answers = list[tuple[str, float]]


def agreement(found: Answers, expected: Answers, photos: Sequence[Photo]) -> tuple[int, int]:
    """On how many photos the best labels agree, of how many that can tell: upright, and no close call for the first server."""
    upright = [number for number, photo in enumerate(photos) if photo.upright]
    telling = [number for number in upright if expected[number][1] >= SURE] or upright
    return sum(found[number][0] == expected[number][0] for number in telling), len(telling)


def compare(servers: Mapping[str, Server], bench: Bench, rounds: int, limit: Callable[[], Figures] | None) -> dict[str, list[Figures]]:
    """All the rounds. Each start of a server also has it name every photo, and all servers must agree."""
    results: dict[str, list[Figures]] = {name: [] for name in [*servers, *([report.LIMIT] if limit else [])]}
    expected: Answers = []
    for number in range(rounds):
        for name in reversed(results) if number % 2 else results:
            same = ""
            if limit and name == report.LIMIT:
                figures = limit()
            else:
                with bench.running(servers[name]) as live:
                    labels = [live.classify(load.request_body(photo, live.server.body), photo.name) for photo in bench.photos]
                    expected = expected or labels
                    alike, of = agreement(labels, expected, bench.photos)
                    if alike < AGREEMENT * of:
                        sys.exit(f"error: {name} names only {alike} of {of} clear photos alike: {labels}, not {expected}")
                    same = f", same top-1 on {alike}/{of} clear photos"
                    figures = measure(live, bench)
            results[name].append(figures)
            say(f"round {number + 1} {name}: " + ", ".join(f"{report.COLUMNS[key]} {value:.1f}" for key, value in figures.items()) + same)
    return results


def measure_limit(bench: Bench, found: Path, seconds: float, *options: str) -> dict[str, Any]:
    """benchmarks/limit.py in a process of its own, which ends with this one. Its samples go to the standard error."""
    arguments = ["--checkpoint", bench.checkpoint, "--photos", bench.folder / "photos", "--cache-dir", bench.folder / "cache"]
    command = [sys.executable, "-m", "benchmarks.limit", *map(str, arguments), "--json", str(found), "--seconds", str(seconds), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        if process.wait():
            sys.exit("error: the in-process limit could not be measured")
    finally:
        load.stop(process)
    return dict(json.loads(found.read_text())["best"])


def limit_figures(best: Mapping[str, Any]) -> Figures:
    """The in-process limit in the columns of a server: of the best loop, and one image at a time."""
    figures = {key: best["overlapped"][key] for key in ("images_per_s", "cpu_ms_per_image", "others_percent")}
    return figures | {"alone_p50_ms": best["single"]["p50_ms"]}


def endure(live: Live, bench: Bench, requests: Sequence[int]) -> Figures:
    """Memory after some requests and after many more, if any, and what the server costs when nobody asks."""
    small, _ = bench.scripts(live.server.body)
    memory, figures, seconds = [], {}, max(1, bench.seconds // 3)
    for goal in requests:
        answered = 0.0
        while answered < goal:
            run = load.drive(live, small, bench.concurrency, seconds)
            good = run["requests"] - run["non_2xx"]
            if not good:
                sys.exit(f"error: {live.server.name} no longer answers, after {answered:.0f} requests of a long load")
            answered += good
            seconds = max(1, min(20, round((goal - answered) * run["seconds"] / good)))
        memory.append(load.memory_mb(load.family(live.pid)))
        say(f"soak {live.server.name}: {memory[-1]:.1f} MB after {answered:.0f} more requests")
    if memory:
        figures["growth_percent"] = 100 * (memory[-1] / memory[0] - 1)
    else:
        load.drive(live, small, bench.concurrency, seconds)
    time.sleep(2)  # for what it puts away after load
    before, begun = load.cpu_seconds(live.pid)[0], time.monotonic()
    time.sleep(10)
    figures["idle_percent"] = 100 * (load.cpu_seconds(live.pid)[0] - before) / (time.monotonic() - begun)
    return figures


def run(servers: dict[str, Server], options: argparse.Namespace, bench: Bench) -> tuple[dict[str, Any], bool]:
    """The whole benchmark: what goes into --json, and whether all that is required was met."""
    ours, once, found = servers.get(OURS), {}, {}
    limit: Callable[[], Figures] | None = None
    soak = SOAK if options.soak else ()
    minutes = 0.0
    if ours:
        with bench.running(ours) as live:  # the first start of the run: the cache is empty
            once["first_start_s"] = live.ready_s
            worker = live.workers()[0]
            small, _ = bench.scripts(ours.body)
            rate = load.drive(live, small, bench.concurrency, 2)["requests"] / 2
        say(f"first start {once['first_start_s']:.1f} s, {worker['precision']} on {worker['device']}, about {rate:.0f} images/s")
        minutes += 1.5 + (sum(soak) / max(rate, 1) + 15) / 60
    counts = sorted({1, 2, load.cores()})
    pairs = sum(a * b <= 2 * max(counts) for a, b in itertools.product(counts, counts))
    tuned = {server.name for server in servers.values() if server.tuned}
    minutes += len(tuned) * pairs * (9 + 0.75 * bench.seconds) / 60
    minutes += options.rounds * (len(servers) * (12 + 2.9 * bench.seconds) + (6 + 1.5 * bench.seconds) * bool(ours)) / 60
    say(f"this takes about {minutes:.0f} minutes")
    if ours and worker["device"] == "cpu":
        # In the precision that the golden samples allowed the server: a quicker one would not give its answers.
        way = ["--engines", "openvino", "--precisions", "bf16" if worker["precision"] == "bf16" else "fp32"]
        brief = max(0.3, bench.seconds / 10)
        found = measure_limit(bench, bench.folder / "limit.json", brief, *way, "--rounds", "3")
        again = ("--again", str(bench.folder / "limit.json"))

        def limit() -> Figures:
            return limit_figures(measure_limit(bench, bench.folder / "again.json", bench.short, *again))

    chosen: dict[str, Server] = {}
    for server in {server.name: server for server in servers.values() if server.tuned}.values():
        chosen[server.name] = search(server, counts, lambda one: first_rate(one, bench))
    servers = {name: chosen.get(server.name, server) for name, server in servers.items()}
    results = compare(servers, bench, options.rounds, limit)
    facts = load.machine()
    tuning = {name: {"workers": server.workers, "threads": server.threads} for name, server in servers.items() if server.tuned}
    data: dict[str, Any] = {"machine": facts, "tuning": tuning, "limit": found, "once": once, "rounds": results}
    costs = {int(batch): cost for batch, cost in found.get("forward", {}).get("cpu_ms_by_batch", {}).items()}
    rows: list[report.Row] = []
    if ours:
        with bench.running(ours) as live:
            once |= endure(live, bench, soak)
        header = read_header(bench.checkpoint)
        rows = report.requirements(results, OURS, header.architecture, header.name, once, costs)
        data["requirements"] = [{"what": row.what, "measured": row.measured, "bound": row.bound, "ok": row.ok} for row in rows]
    print(f"{facts['cpu']}, {facts['cores']} cores, bf16 instructions: {', '.join(facts['bf16']) or 'none'}")
    print(", ".join(f"{name} {value}" for name, value in facts["versions"].items()))
    for name, numbers in tuning.items():
        print(f"{name}: {numbers['workers']} workers, OMP_NUM_THREADS {numbers['threads']}")
    print(f"\n{report.table(results)}")
    quiet = report.QUIET_PERCENT
    if disturbed := [name for name, rounds in results.items() if max(one["others_percent"] for one in rounds) > quiet]:
        print(f"\nDISTURBED: other processes took over {quiet} % of the machine in a round of {', '.join(disturbed)}; measure again")
    if found:
        by_batch = ", ".join(f"{batch}: {cost:.2f}" for batch, cost in costs.items())
        print(f"\n{found['overlapped']['words']}\n{found['single']['words']}\nCPU ms of an image's forward by batch size: {by_batch}")
    if ours:
        print(f"\n{report.verdict(rows)}")
    return data, all(row.ok for row in rows)


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument("--photos", type=Path, default=ROOT / "examples", help="folder of JPEG, PNG or WebP files, or of folders of them")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="ours first; one twice shows the noise")
    for name, default in (("--concurrency", 16), ("--seconds", 10), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--ours-raw", action="store_true", help="post plain image bytes to Spyglass, multipart to the others")
    parser.add_argument("--soak", action=argparse.BooleanOptionalAction, default=True, help="watch the memory over 22,000 requests")
    parser.add_argument("--json", type=Path, help="also write every round's figures to this file")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        parser.error("wrk, which makes the load, is missing: apt install wrk")
    try:
        read_header(options.checkpoint)
    except CheckpointError as error:
        parser.error(str(error))
    servers: dict[str, Server] = {}
    for name in options.servers:
        server = replace(SERVERS[name], body="raw") if options.ours_raw and name == OURS else SERVERS[name]
        servers[f"{name} ({len(servers) + 1})" if name in servers else name] = server
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda got, _: sys.exit(128 + got))  # an exception, so that every `finally` runs
    with tempfile.TemporaryDirectory(prefix="serving-") as temporary:
        folder, photos = Path(temporary), load.gather(options.photos)
        (folder / "photos").mkdir()
        for index, photo in enumerate(photos):  # for the limit, which must see the very same
            (folder / "photos" / f"{index:03}.jpg").write_bytes(photo.data)
        bench = Bench(options.checkpoint.resolve(), folder, photos, load.big(photos), options.concurrency, options.seconds)
        say(f"{len(photos)} photos, {len(bench.big)} of 12 megapixels; {json.dumps(load.machine())}")
        data, good = run(servers, options, bench)
    if options.json:
        # Of a path the name: reports are shared.
        options.json.write_text(json.dumps({"settings": vars(options), **data}, indent=1, default=lambda path: path.name))
    sys.exit(not good)


if __name__ == "__main__":
    main()
