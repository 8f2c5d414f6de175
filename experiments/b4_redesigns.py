"""B4: architectures of the second paper redesigned with more heads and fewer layers.

Every redesign is built by timm's own arguments and counted without storage, its original too. On a GPU, at full size,
both are timed in turns (bfloat16, random images, the largest batch that fits up to 128): images forward, and forward
and backward, with peak memory. That the accuracy stays, as the paper says, is not tested here: that takes ImageNet.
Two counts that differ from the paper's agree by another reading of the redesign, which arithmetic finds (`readings`).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.progress import Track

CLAIM = "B4"
TITLE = "Redesigned vision models, counted and timed"
ROWS = {"tiny": 2, "small": 6, "full": 6}
BATCH = 128
TURNS = 5  # of each model, after one that warms up
TURN_SECONDS = 0.25
SIDES = ("before", "after")


class Row(NamedTuple):
    """A redesign of the paper: millions of parameters as printed there, None where we have no figure."""

    title: str
    name: str
    depth: int | tuple[int, ...]
    heads: int | None
    mlp_ratio: float | None = None
    before: float | None = None
    after: float | None = None


TABLE = (
    Row("XCiT-M", "xcit_medium_24_p16_224", 12, 16, None, 84.4, 59.0),
    Row("XCiT-L", "xcit_large_24_p16_224", 12, 24, None, 189.1, 103.8),
    Row("TNT-B", "tnt_b_patch16_224", 8, 16, None, 65.4, 30.9),
    Row("DaViT-B", "davit_base", (1, 1, 5, 1), None, None, 88.0, 62.0),
    Row("DaViT-L", "davit_large", (1, 1, 5, 1), None, None, 196.8, 140.0),
    Row("ViT-B", "vit_base_patch16_224", 8, 16, 2.0),
)


def run(size: str, device: str, assets: Path | None, track: Track) -> dict[str, Any]:
    """Counts of the paper's redesigns, and times where there is a GPU."""
    rows = [counted(row) for row in TABLE[: ROWS[size]]]
    if size == "full" and device == "cuda":
        for row, found in zip(TABLE, track(rows, "redesigns"), strict=True):
            found["speed"] = compared(row, device)
    return {"seeds": [], "rows": rows}


def counted(row: Row) -> dict[str, Any]:
    """Parameters in millions, ours and the paper's; where they differ, the depth that would come nearest."""
    from headwise.research.redesign import parameters, redesign, stock

    before = parameters(stock(row.name)) / 1e6
    after = parameters(redesign(row.name, row.depth, row.heads, row.mlp_ratio, "meta")) / 1e6
    agrees = None if row.after is None else round(after, 1) == row.after
    return {
        "title": row.title,
        "name": row.name,
        "depth": row.depth,
        "heads": row.heads,
        "mlp_ratio": row.mlp_ratio,
        "millions": {"before": before, "after": after},
        "paper": {"before": row.before, "after": row.after},
        "agrees": agrees,
        "nearest": nearest(row) if agrees is False else None,
    }


def nearest(row: Row) -> dict[str, Any]:
    """The depth (of the deepest stage) at which the redesign's count comes nearest to the paper's."""
    from headwise.research.redesign import build_of, parameters, redesign, stock

    depths = build_of(stock(row.name)).depth
    deepest = depths.index(max(depths))

    def millions(layers: int) -> float:
        tried = layers if len(depths) == 1 else tuple(layers if i == deepest else d for i, d in enumerate(depths))
        return parameters(redesign(row.name, tried, row.heads, row.mlp_ratio, "meta")) / 1e6

    one = millions(1)
    step = millions(2) - one  # layers of a stage are alike
    best = min(range(1, max(depths) + 1), key=lambda layers: abs(one + (layers - 1) * step - (row.after or 0)))
    return {"layers": best, "millions": millions(best)}


def compared(row: Row, device: str, batch: int = BATCH) -> dict[str, Any]:
    """Original and redesign side by side, at the largest batch that both can train with."""
    import torch

    from headwise.research.redesign import redesign

    torch.manual_seed(0)
    models = {
        "before": redesign(row.name, device=device).bfloat16(),
        "after": redesign(row.name, row.depth, row.heads, row.mlp_ratio, device).bfloat16(),
    }
    while True:
        try:
            return {"batch": batch, **{mode: turns(models, mode, batch) for mode in ("training", "inference")}}
        except torch.cuda.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def turns(models: dict[str, Any], mode: str, batch: int) -> dict[str, Any]:
    """Milliseconds per image of every turn, and on a GPU the peak memory of a model with its batch."""
    import torch

    device = next(models["before"].parameters()).device
    images = torch.randn(batch, 3, 224, 224, device=device, dtype=torch.bfloat16)
    labels = torch.randint(1000, (batch,), device=device)
    steps = {side: step(models[side], mode, images, labels) for side in SIDES}
    weights = {side: sum(p.numel() * p.element_size() for p in models[side].parameters()) for side in SIDES}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks: dict[str, int] = {}
    for turn in range(TURNS + 1):
        for side, other in zip(SIDES, reversed(SIDES), strict=True):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken = timed(steps[side], device)
            models[side].zero_grad(set_to_none=True)
            if device.type == "cuda":
                peaks[side] = torch.cuda.max_memory_allocated() - weights[other]
            if turn:  # the first warms up
                times[side].append(taken / batch * 1e3)
    return {"ms_per_image": times, "peak_bytes": peaks}


def step(model: Any, mode: str, images: Any, labels: Any) -> Callable[[], None]:
    """One forward pass, or one with its backward pass; no optimiser."""
    import torch

    def forward() -> None:
        with torch.inference_mode():
            model(images)

    def both() -> None:
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images).float(), labels).backward()

    model.train(mode == "training")
    return both if mode == "training" else forward


def timed(work: Callable[[], None], device: Any) -> float:
    """Seconds of one call, on average over a turn."""
    import torch

    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < TURN_SECONDS:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - start) / calls


def readings(row: dict[str, Any]) -> dict[str, float]:
    """Other readings of a redesign, in millions of parameters: what would change, counted matrix by matrix."""
    count = row["millions"]["after"]
    if row["title"] == "XCiT-M":  # width 512; heads of 32 become heads of 64, so attention is 1024 wide
        extra = 512 * 3 * (1024 - 512) + 3 * (1024 - 512) + (1024 - 512) * 512
        return {"16 heads of 64 in its 12 blocks: wider attention": count + 12 * extra / 1e6}
    if row["title"] == "TNT-B":  # width 640 outside; its MLP of 2560 becomes one of 1280
        fewer = 2 * 640 * (2560 - 1280) + (2560 - 1280)
        return {"its outer MLP halved": count - 8 * fewer / 1e6}
    return {}


def saved(before: float, after: float) -> str:
    """How much less, in words."""
    return f"{100 * (1 - after / before):.0f}%"


def measured(result: dict[str, Any]) -> str:
    """The numbers in words."""
    parts = [counts_in_words(row) for row in result["rows"]]
    known = [row for row in result["rows"] if row["agrees"] is not None]
    agree = sum(row["agrees"] for row in known)
    words = f"Millions of parameters: {'; '.join(parts)}. {agree} of {len(known)} redesigns agree with the paper."
    fast = [row for row in result["rows"] if row.get("speed")]
    if fast:
        words += f" Redesign against original, bf16: {'; '.join(map(speed, fast))}."
    return f"{words} Whether the accuracy stays was not tested."


def counts_in_words(row: dict[str, Any]) -> str:
    """The counts of one row."""
    ours, paper = row["millions"], row["paper"]["after"]
    text = f"{row['title']} {ours['before']:.1f} to {ours['after']:.1f} (-{saved(**ours)}"
    if paper is None:
        return f"{text}, with half the MLP)" if row["mlp_ratio"] else f"{text})"
    if row["agrees"]:
        return f"{text}, as in the paper)"
    near = row["nearest"]
    return f"{text}; the paper says {paper:.1f}, nearest with {near['layers']} layers, {near['millions']:.1f})"


def speed(row: dict[str, Any]) -> str:
    """Times and memory of one row, as shares of the original's; the range is that over turns."""
    parts = []
    for mode in ("inference", "training"):
        times, peaks = row["speed"][mode]["ms_per_image"], row["speed"][mode]["peak_bytes"]
        ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
        parts.append(
            f"{mode} {statistics.median(times['before']):.3f} to {statistics.median(times['after']):.3f} ms per image "
            f"({min(ratios):.0%} to {max(ratios):.0%})"
            + (f", memory {peaks['after'] / peaks['before']:.0%}" if peaks else "")
        )
    return f"{row['title']} (batch {row['speed']['batch']}) {', '.join(parts)}"


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Parameters of originals and redesigns, the paper's marked; beside them, times where there are any."""
    from headwise.report.plots import PALETTE

    rows = result["rows"]
    fast = [row for row in rows if row.get("speed")]
    panels = figure.subplots(1, 2 if fast else 1, squeeze=False)[0]
    places = range(len(rows))
    for side, colour, shift in (("before", PALETTE[6], -0.2), ("after", PALETTE[0], 0.2)):
        label = "original" if side == "before" else "redesign"
        panels[0].bar([p + shift for p in places], [r["millions"][side] for r in rows], 0.4, color=colour, label=label)
    marks = [(p + 0.2, r["paper"]["after"]) for p, r in zip(places, rows, strict=True) if r["paper"]["after"]]
    panels[0].plot(*zip(*marks, strict=True), "D", color=PALETTE[1], label="redesign, in the paper")
    panels[0].set_ylabel("millions of parameters")
    if fast:
        for mode, colour, shift in (("inference", PALETTE[2], -0.2), ("training", PALETTE[4], 0.2)):
            times = [row["speed"][mode]["ms_per_image"] for row in fast]
            shares = [statistics.median(t["after"]) / statistics.median(t["before"]) for t in times]
            panels[1].bar([p + shift for p in range(len(fast))], shares, 0.4, color=colour, label=mode)
        panels[1].axhline(1, color="#999999", linestyle="--", linewidth=1)
        panels[1].set_ylabel("time per image, redesign / original")
    for panel, shown in zip(panels, (rows, fast), strict=False):
        panel.set_xticks(range(len(shown)), [row["title"] for row in shown], rotation=30)
        panel.set_xlabel("architecture")
        panel.set_ylim(top=1.35 * panel.get_ylim()[1])  # room for the legend
        panel.legend()
