"""Tables of docs/MEMORY.md beside those of benchmarks/memory.py: single cuts, resident memory, vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMOL = "SmolLM2-135M (Q4_1, dequantised)"
NAMES = {
    "SmolLM2-135M-Instruct.Q4_1": SMOL,
    "SmolLM2-135M-Instruct": SMOL,
    "embedded-32k": "embedded, with a context of 32,768 in its configuration",
}
Row = dict[str, Any]
PROMPT = 192  # tokens that packed weights are timed with
UNPACKED = "unpacked, float32"  # the way to load weights to which others are compared


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)]


def model_name(stem: str) -> str:
    """A model as other pages call it."""
    return NAMES.get(stem, stem)


def parts(folder: Path) -> list[str]:
    """All tables whose results are there."""
    units = [json.loads(path.read_text()) for path in sorted(folder.glob("unit-prices-*.json"))]
    lines = [line for result in units for line in _unit_prices(result)]
    held = [json.loads(path.read_text()) for path in sorted(folder.glob("resident-*.json"))]
    engine = folder / "serving-packed.json"
    stays = folder / "packed-weights.json"
    lines += [*_resident(held), *(packed_weights(json.loads(stays.read_text())) if stays.exists() else [])]
    cuda = folder / "packed-cuda.json"
    lines += packed_cuda(json.loads(cuda.read_text())) if cuda.exists() else []
    return [*lines, *(_served(json.loads(engine.read_text())) if engine.exists() else [])]


def _unit_prices(result: Row) -> list[str]:
    heads = ["cut", "parameters saved", "measured damage", "KL", "damage per million saved"]
    cells = [
        [row["cut"], f"{row['saved'] / 1e6:.2f}M", f"{row['damage']:.4f}", f"{row['kl']:.4f}",
         f"{row['damage'] / row['saved'] * 1e6:.4f}"] for row in result["rows"]
    ]  # fmt: skip
    about = f"{model_name(result['model'])}: {result['read']:,} calibration tokens of {result['data']}, "
    about += f"{result['evaluated']:,} of {result['eval']}; {_about(result)}."
    return [
        "## Parameters: what single cuts cost",
        "",
        *table(heads, cells),
        "",
        f"By benchmarks/unit_prices.py. {about}",
        "",
    ]


def _resident(found: list[Row]) -> list[str]:
    if not found:
        return []
    cells = []
    for row in found:
        certified = row["certified"]["weight_bytes_after"]
        cells.append([
            f"{model_name(row['model'])}, {row['budget']}", _size(certified), _against(row["weights"], certified),
            _against(row["weights_after_first_run"], certified), _size(row["planned_cache"]),
            _against(row["cache"], row["planned_cache"]), _against(row["cache_with_room"], row["planned_cache"]),
            _size(row["grown"]),
        ])  # fmt: skip
    heads = ["run", "weights, certified", "in memory when loaded", "after the first run", "cache, planned",
             "cache, real", "with allocated free space", "growth of the process on load"]  # fmt: skip
    about = "; ".join(dict.fromkeys(map(_about, found)))
    return ["## Resident memory", "", *table(heads, cells), "", f"By benchmarks/memory_resident.py; {about}.", ""]


def packed_weights(result: Row) -> list[str]:
    """What models with weights in few bits take in memory and in time, in Markdown."""
    models: dict[tuple[str, int], dict[str, Row]] = {}
    for row in result["rows"]:
        models.setdefault((row["model"], row["bits"]), {})[row["way"]] = row
    told = ("unpacked, bfloat16", "packed, bfloat16", "packed=True, optimise=True")
    kinds = (UNPACKED, *told[:2])
    heads = ["model", "bits", *(f"memory, {way}" for way in (*kinds[:2], "packed"))]
    heads += [f"{what}, {way}" for what in ("step", "prompt") for way in told]
    cells = []
    for (model, bits), ways in models.items():
        cells.append([model_name(model), str(bits), *(f"{ways[way]['memory'] / 1e6:.1f} MB" for way in kinds)])
        cells[-1] += [_ratio(ways[way][f"{stage}_ratio"]) for stage in ("decode", "prefill") for way in told]
    about = (
        f"By benchmarks/packed_weights.py. Times are shares of those with {UNPACKED} weights: a step after {PROMPT} "
        f"tokens, and that prompt; medians and quartiles of {result['repeats']} turns. All matrices have the same "
        f"bits; the cache is not in bits. {result['hardware']['processor']}, {result['threads']} threads, "
        f"{result['date']}, commit {result['commit']}."
    )
    return ["## Weights that stay packed, on a CPU", "", *table(heads, cells), "", about, ""]


def packed_cuda(result: Row) -> list[str]:
    """How much faster products and steps with packed weights are on a GPU, in Markdown."""
    counts = list(dict.fromkeys(row["count"] for row in result["rows"]))
    matrices: dict[tuple[int, int, int], dict[int, Row]] = {}
    for row in result["rows"]:
        matrices.setdefault((row["rows"], row["columns"], row["bits"]), {})[row["count"]] = row
    heads = ["matrix", "bits", *(f"{count} row{'s' * (count > 1)}" for count in counts)]
    heads.append(f"read with {counts[0]} row{'s' * (counts[0] > 1)}")
    cells = [
        [f"{rows:,} x {columns:,}", str(bits), *(_ratio(found[count]["ratio"]) for count in counts),
         f"{found[counts[0]]['bytes_per_s'] / 1e12:.2f} TB/s"] for (rows, columns, bits), found in matrices.items()
    ]  # fmt: skip
    steps = [
        f"{step['texts']} text{'s' * (step['texts'] > 1)} {_ratio(step['ratio'])} "
        f"({step['bfloat16_us']['median']:,.0f} to {step['ours_us']['median']:,.0f} microseconds)"
        for step in result["steps"]
    ]
    about = (
        f"By benchmarks/packed_cuda.py: PyTorch's time with bfloat16 over ours beside it (low to high of "
        f"{result['rounds']}), for products of rows with random matrices of an 8B model's shapes. A step of a random "
        f"model of Llama 3.2 1B's shape after {result['steps'][0]['length']:,} tokens, all of whose matrices have "
        f"{result['steps'][0]['bits']} bits, against the same in bfloat16, both with `optimise=True`: "
        f"{'; '.join(steps)}. {_about(result)}."
    )
    return ["## Weights that stay packed, on a GPU", "", *table(heads, cells), "", about, ""]


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _against(count: int, wanted: int) -> str:
    return f"{_size(count)} ({count / wanted - 1:+.1%})"


def _about(result: Row) -> str:
    return f"{result['hardware']}, {result['date']}, commit {result['commit']}"


def _served(result: Row) -> list[str]:
    cells = []
    for row in result["rows"]:
        told = ["", "", "", row.get("note", "").partition(" Reasons")[0]]
        if row["works"]:
            speed = sorted(row["tokens_per_second"])[len(row["tokens_per_second"]) // 2]
            same = f"{row['same_tokens']} of {row['prompts']}"
            told = [same, f"{row['log_probability_error']:.3f} nats", f"{speed:,.0f}", ""]
        cells.append([row["model"], str(row["bits"]), *told])
    heads = ["model", "bits of all layers", "same tokens as transformers", "largest error of a log-probability",
             "tokens per second", "note"]  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    about = f"By benchmarks/memory_vllm.py, in bfloat16; {versions}; {_about(result)}."
    return ["## vLLM", "", *table(heads, cells), "", about, ""]
