"""How the time of probing, planning, cutting and healing grows with tokens, layers and width.

    python benchmarks/growth.py --out benchmarks/results/growth.json   # a CUDA device; rewrite docs/SCALE.md afterwards
    python benchmarks/growth.py --device cpu --small --out /tmp/growth.json   # tiny sizes, to try the script

One process, random bf16 weights that are made on the device, random tokens: no time of a file, of starting Python or of
the first use of a kernel is counted. A size is measured once per repeat, after a warm-up that is left out; the repeats
are apart in time. Loading, text, saving and verifying are left out: `benchmarks/scale.py` times whole runs. Lines are
fitted through the logarithms of the median seconds, for all stages together and for each that takes long.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from provenance import commit

RESULT = Path(__file__).parent / "results" / "growth.json"
VOCABULARY = 32_000
ROW = 512  # tokens
WHOLE = "all stages"
STAGES = {"damage of bits": "gradients", "measured damage": "measured damage", "refit": "refit"}  # as the page says


class Size(NamedTuple):
    """Calibration tokens, layers and width of one measurement."""

    tokens: int
    layers: int
    width: int


BASE = Size(65_536, 4, 4096)  # where the others grow
GROWTH = {
    "tokens": (32_768, 65_536, 131_072, 262_144),
    "layers": (2, 4, 8, 16),
    "width": (1024, 2048, 4096, 8192),
}
SMALL, SMALL_GROWTH = Size(1_024, 1, 128), {"tokens": (512, 1_024, 2_048)}


def sizes(base: Size, growth: dict[str, Sequence[int]]) -> list[Size]:
    """Every size once, the smallest work first."""
    found = {base._replace(**{axis: value}) for axis, values in growth.items() for value in values}
    return sorted(found, key=lambda size: (size.tokens * size.layers * size.width**2, size))


def shape(size: Size) -> dict[str, Any]:
    """A decoder in the proportions of Llama-3: heads of 128, four queries a group, an MLP 3.5 times as wide."""
    heads = max(1, size.width // 128)
    return dict(
        hidden_size=size.width,
        intermediate_size=7 * size.width // 2,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        num_hidden_layers=size.layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=8_192,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
    )


class Stages:
    """Progress of a run, as the seconds of every stage."""

    def __init__(self, wait: Any) -> None:
        self.wait, self.seconds = wait, dict[str, float]()

    def __call__(self, items: Sequence[Any], label: Any) -> Iterable[Any]:
        self.wait()
        start = time.perf_counter()
        yield from items
        self.wait()
        name = label if isinstance(label, str) else label()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def source(size: Size, device: str) -> tuple[Any, Any]:
    """The settings of a run without options, and a model in memory with rows of random tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from headwise import families, pipeline
    from headwise.data import split
    from headwise.runs.settings import Settings
    from headwise.stages.source import pooled_heads
    from headwise.tasks.causal import Causal

    torch.manual_seed(0)
    settings = Settings("random", ("kv=50%",), device=device, tokens=size.tokens)
    config = LlamaConfig(**shape(size))
    try:
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    rows = torch.randint(3, VOCABULARY, (size.tokens // ROW + 8, ROW))
    family = families.family_of(config)
    model = family.tailor(model, pooled_heads(settings, family, model, Causal()), share="all")
    texts = (*split.rehearsed(rows[8:]), rows[:8], "random tokens")
    context = settings.served(family.longest(config))
    return settings, pipeline.InMemory(family, model, None, *texts, context=context, seed=settings.seed)


def measured(size: Size, device: str) -> dict[str, Any]:
    """Seconds of one size, by stage and in all."""
    import torch

    from headwise import memory, pipeline

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    settings, bench = source(size, device)
    memory.emptied()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    stages = Stages(wait)
    wait()
    start = time.perf_counter()
    pipeline.fit(settings, bench, track=stages)
    wait()
    found = {"seconds": time.perf_counter() - start, "stages": stages.seconds}
    return found | ({"device_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {})


def grow(device: str, base: Size, growth: dict[str, Sequence[int]], repeats: int, seconds: float, out: Path) -> None:
    """Measure every size, the repeats one after the other; no size is begun after so many seconds."""
    import torch

    from headwise.checks import speed
    from headwise.heal import refit

    refit.WORTHWHILE = None  # type: ignore[assignment]  # healed at every size
    begin, wanted = time.perf_counter(), sizes(base, growth)
    measured(wanted[0], device)  # warms up
    found: dict[str, Any] = {"base": base._asdict(), "growth": growth, "rows": []}
    found |= {"hardware": speed.machine(torch.device(device)), "commit": commit()}
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    for repeat in range(repeats):
        for size in wanted:
            if time.perf_counter() - begin > seconds:
                return
            row = {**size._asdict(), "repeat": repeat, **measured(size, device)}
            found["rows"].append(row)
            out.write_text(json.dumps(found, indent=1) + "\n")
            told = ", ".join(f"{name} {took:.2f}" for name, took in row["stages"].items() if name in STAGES)
            print(f"{time.perf_counter() - begin:6.1f} s: {size} {row['seconds']:.2f} s ({told})", flush=True)


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The slope of the straight line through the logarithms, and the largest ratio of a point to it.

    >>> [round(number, 3) for number in line([(1, 3.0), (2, 6.0), (4, 12.0)])]
    [1.0, 1.0]
    """
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    slope, start = statistics.linear_regression(xs, ys)
    return slope, math.exp(max(abs(y - start - slope * x) for x, y in zip(xs, ys, strict=True)))


def along(rows: list[dict[str, Any]], base: dict[str, int], axis: str, stage: str) -> dict[int, list[float]]:
    """Seconds of all repeats, by the size that grows."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if all(row[other] == value for other, value in base.items() if other != axis):
            took = row["seconds"] if stage == WHOLE else row["stages"].get(stage)
            if took is not None:
                found.setdefault(row[axis], []).append(took)
    return dict(sorted(found.items()))


def _cell(value: int, took: list[float]) -> str:
    spread = f" ({min(took):.1f} to {max(took):.1f})" if len(took) > 1 else ""
    return f"{value:,}: {statistics.median(took):.1f}{spread}"


def section(file: Path = RESULT) -> list[str]:
    """What the page says of it, once it was measured."""
    if not file.exists():
        return []
    found = json.loads(file.read_text())
    told = ["", "## How time grows", ""]
    told += ["| grows | stage | seconds: median (lowest to highest) | slope | farthest from the line |"]
    told += ["| --- |" + " --- |" * 4]
    for axis in found["growth"]:
        for stage in (WHOLE, *STAGES):
            points = along(found["rows"], found["base"], axis, stage)
            if len(points) < 3:
                continue
            slope, off = line([(value, statistics.median(took)) for value, took in points.items()])
            cells = ", ".join(_cell(*point) for point in points.items())
            told.append(f"| {axis} | {STAGES.get(stage, stage)} | {cells} | {slope:.2f} | {off:.2f} times |")
    counts = {(row["tokens"], row["layers"], row["width"]): 0 for row in found["rows"]}
    for row in found["rows"]:
        counts[row["tokens"], row["layers"], row["width"]] += 1
    fixed = "{tokens:,} calibration tokens, {layers} layers, width {width:,}".format(**found["base"])
    times = f"at least {min(counts.values())} times" if min(counts.values()) > 1 else "at least once"
    return [*told, "", f"Where they do not grow: {fixed}; kv=50%, probing, planning, cutting and healing of a model in "
            f"memory, each size {times}. {found['hardware']}, {found['date']}, commit {found['commit']}."]  # fmt: skip


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further size after so many")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    base, growth = (SMALL, SMALL_GROWTH) if asked.small else (BASE, GROWTH)
    grow(asked.device, base, dict(growth), asked.repeats, asked.seconds, asked.out)
    print("\n".join(section(asked.out)))


if __name__ == "__main__":
    main()
