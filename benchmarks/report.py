"""From the rounds' figures to tables, ratios, and the rows of what is required."""

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load import Figures

LIMIT = "in-process limit"
QUIET_PERCENT = 5  # others' share of the machine up to which a round counts as undisturbed
# What one round says about one server, by the titles of the table; the limit has a few of them.
COLUMNS = {
    **{"images_per_s": "images/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "alone_p50_ms": "alone p50 ms", "alone_p99_ms": "alone p99 ms"},
    **{
        "crowd_images_per_s": "64: images/s",
        "crowd_p99_ms": "64: p99 ms",
        "big_images_per_s": "12 MP: images/s",
        "big_p99_ms": "12 MP: p99 ms",
    },
    **{"cpu_ms_per_image": "CPU ms/image", "memory_mb": "PSS MB", "ready_s": "ready s", "mean_batch": "mean batch"},
    **{"non_2xx": "non-2xx", "errors": "errors"},
    "others_percent": "others %",  # of the machine, used by other processes: a round with more than a few is worth little
}
Results = Mapping[str, Sequence[Figures]]  # by server (or LIMIT), the figures of each round


def over(a: float, b: float) -> float:
    """Their ratio; none where the other did nothing at all."""
    return a / b if b else math.nan


def across(ours: Sequence[Figures], other: Sequence[Figures], key: str, compare: Callable[[float, float], float] = over) -> float:
    """Ours compared with another's, round by round, then the median: what slows the machine for a round slows both."""
    return statistics.median(compare(a[key], b[key]) for a, b in zip(ours, other, strict=True))


def ratios(ours: Sequence[Figures], other: Sequence[Figures]) -> Figures:
    """`across` for every figure that both have."""
    keys = [key for key in COLUMNS if key != "others_percent" and all(figures.get(key) for figures in other) and key in ours[0]]
    return {key: across(ours, other, key) for key in keys}


def lay_out(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first holds the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines)


def table(results: Results) -> str:
    """Median (least-most) over the rounds, a line for each server, and a line for each but the first with the ratios."""

    def cell(values: Sequence[float]) -> str:
        if not values:
            return ""
        return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" if any(values) else "0"

    rows = [["server", *COLUMNS.values()]]
    for name, rounds in results.items():
        rows.append([name, *(cell([figures[key] for figures in rounds if key in figures]) for key in COLUMNS)])
    ours, *others = results
    for other in others:
        found = ratios(results[ours], results[other])
        rows.append([f"{ours} / {other}", *(f"{found[key]:.2f}" if key in found else "" for key in COLUMNS)])
    return lay_out(rows)


@dataclass(frozen=True)
class Row:
    """One requirement and what was measured."""

    what: str
    relation: str  # <=, < or >=
    bound: float
    measured: float
    note: str = ""  # a reason why it holds nonetheless

    @property
    def ok(self) -> bool:
        compare = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}[self.relation]
        return bool(self.note) or (math.isfinite(self.measured) and compare(self.measured, self.bound))


def smaller_are_as_quick(cost_by_batch: Mapping[int, float]) -> bool:
    """Whether an image costs the same, within 5 %, in forwards of 1 to 4 images: then waiting for more gains nothing."""
    costs = [cost for batch, cost in cost_by_batch.items() if batch <= 4]
    return bool(costs) and max(costs) <= 1.05 * min(costs)


def requirements(results: Results, ours: str, architecture: str, name: str, once: Figures, cost_by_batch: Mapping[int, float]) -> list[Row]:
    """The rows, as far as their figures were measured. `once`: what is measured once, not in rounds."""
    mine, light = results[ours], "efficientnet_lite0" in architecture
    rows = []

    def median(key: str) -> float:
        return statistics.median(figures[key] for figures in mine)

    if limit := results.get(LIMIT):
        extra = across(mine, limit, "cpu_ms_per_image", operator.sub)
        rows.append(Row("CPU ms/image at 16, above the in-process loop's", "<=", 0.8, extra))
        rows.append(Row("images/s at 16 / in-process limit", ">=", 0.9, across(mine, limit, "images_per_s")))
    if peer := results.get("quickstart"):
        rows.append(Row("images/s at 16 / LitServe's quickstart", ">=", 6 if light else 3, across(mine, peer, "images_per_s")))
    if peer := results.get("fastapi-onnx"):
        rows.append(Row("images/s at 16 / FastAPI + ONNX Runtime", ">=", 1.9 if light else 1.8, across(mine, peer, "images_per_s")))
    if peer := results.get("quickstart"):
        rows.append(Row("12 megapixels: images/s at 4 / LitServe's quickstart", ">=", 6, across(mine, peer, "big_images_per_s")))
    if limit:
        rows.append(Row("p50 alone / decode + forward of one image", "<=", 1.25, across(mine, limit, "alone_p50_ms")))
    rows.append(Row("p99 / p50 at 16", "<=", 2, statistics.median(figures["p99_ms"] / figures["p50_ms"] for figures in mine)))
    if all("mean_batch" in figures for figures in mine):
        note = "smaller batches are as quick" if smaller_are_as_quick(cost_by_batch) else ""
        rows.append(Row("mean batch at 16", ">=", 3, median("mean_batch"), note if median("mean_batch") < 3 else ""))
    rows.append(Row("answers that are not 200, failed connections", "<=", 0, sum(one["non_2xx"] + one["errors"] for one in mine)))
    rows.append(Row("start to ready, model converted before, s", "<=", 1.5, median("ready_s")))
    if name == "efficientnet_lite0":
        rows.append(Row("PSS after load, MB", "<", 350, median("memory_mb")))
    for key, what, relation, bound in (
        ("first_start_s", "first start, with an empty cache, s", "<=", 15.0),
        ("idle_percent", "CPU while idle, % of a core", "<", 1.0),
        ("growth_percent", "memory grown over 20,000 requests, %", "<", 2.0),
    ):
        if key in once:
            rows.append(Row(what, relation, bound, once[key]))
    return rows


def verdict(rows: Iterable[Row]) -> str:
    """The rows as a table."""
    lines = [["what", "required", "measured", "ok"]]
    for row in rows:
        lines.append(
            [
                row.what,
                f"{row.relation} {row.bound:g}",
                f"{row.measured:.2f}",
                ("yes" if row.ok else "NO") + f" ({row.note})" * bool(row.note),
            ]
        )
    return lay_out(lines)
