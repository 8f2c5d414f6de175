"""Tables of docs/MEMORY.md beside those of benchmarks/memory.py: parameters, resident memory, vLLM."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PLANS = ("exact", "exact, 3 rounds", "uniform", "depth", "svd", "magnitude")
HEALS = ("none", "refit", "distill")
NAMES = {"SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M (Q4_1, dequantised)"}
Row = dict[str, Any]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)]


def model_name(stem: str) -> str:
    """A model as other pages call it."""
    return NAMES.get(stem, stem)


def parts(folder: Path) -> list[str]:
    """All tables whose results are there."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("params-*.json"))]
    lines = [line for result in found for line in _parameters(result)]
    units = [json.loads(path.read_text()) for path in sorted(folder.glob("unit-prices-*.json"))]
    lines += [line for result in units for line in _unit_prices(result)]
    held = [json.loads(path.read_text()) for path in sorted(folder.glob("resident-*.json"))]
    engine = folder / "serving-packed.json"
    return [*lines, *_resident(held), *(_served(json.loads(engine.read_text())) if engine.exists() else [])]


def _parameters(result: dict[str, Any]) -> list[str]:
    settings, rows = result["settings"], result["rows"]
    name = model_name(Path(settings["model"]).stem)
    cells = []
    for budget in sorted({row["budget"] for row in rows}, reverse=True):
        for heal in (heal for heal in HEALS if any(row["heal"] == heal for row in rows)):
            mine = {row["plan"]: row for row in rows if row["budget"] == budget and row["heal"] == heal}
            if mine:
                cells.append([budget.partition("=")[2], heal, *(_change(mine.get(plan)) for plan in PLANS)])
    used = [plan for plan in PLANS if any(row["plan"] == plan for row in rows)]
    columns = [place for place, plan in enumerate(("", "", *PLANS)) if not plan or plan in used]
    about = f"Increase of perplexity. Calibrated on {result['calibration_tokens']:,} tokens of "
    about += f"{settings['data'] or 'text of its own'}, evaluated on {result['evaluation_tokens']:,} tokens of "
    about += f"{settings['eval'] or settings['data']} in rows of {result['evaluation_length']:,}; perplexity of the "
    about += (
        f"source {result['perplexity_before']:.2f}. {result['hardware']}, {result['date']}, commit {result['commit']}."
    )
    tokens = sorted({row["heal_tokens"] for row in rows if row["heal"] == "distill"})
    about += f" Distilled on {' and '.join(f'{count:,}' for count in tokens)} tokens." if tokens else ""
    heads = ["kept", "healed", *PLANS]
    picked = [[line[place] for place in columns] for line in [heads, *cells]]
    title = f"## Parameters: {name}, cut in {', '.join(settings['allow'])}"
    return [title, "", *table(picked[0], picked[1:]), "", about, ""]


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


def _change(row: Row | None) -> str:
    if row is None:
        return ""
    low, mean, high = (math.expm1(row[name]) for name in ("measured_low", "measured", "measured_high"))
    return f"{mean:+.1%} ± {(high - low) / 2:.1%}"


def _resident(found: list[Row]) -> list[str]:
    if not found:
        return []
    cells = []
    for row in found:
        certified = row["certified"]["weight_bytes_after"]
        cells.append([
            f"{row['model']}, {row['budget']}", _size(certified), _against(row["weights"], certified),
            _against(row["weights_after_first_run"], certified), _size(row["planned_cache"]),
            _against(row["cache"], row["planned_cache"]), _against(row["cache_with_room"], row["planned_cache"]),
            _size(row["grown"]),
        ])  # fmt: skip
    heads = ["run", "weights, certified", "in memory when loaded", "after the first run", "cache, planned",
             "cache, real", "with allocated free space", "growth of the process on load"]  # fmt: skip
    about = "; ".join(dict.fromkeys(map(_about, found)))
    return ["## Resident memory", "", *table(heads, cells), "", f"By benchmarks/memory_resident.py; {about}.", ""]


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
