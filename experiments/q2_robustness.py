"""Open question: does a cut model lose more than its source under typos, shuffled words and unfamiliar text?

The source and the model cut to 75% and 50% of its cache (exact, refitted) read the same held-out text: clean, with
typos (letters swapped, dropped or doubled), with the words of each line shuffled, and text of another kind than that of
the calibration. What counts is the extra damage: cut minus source on that text, less the same on clean text, with a
bootstrap interval over blocks of both. Fragile: the extra damage is above zero beyond its interval. The KL to
the source stands beside it: it says how far predictions moved even where the source itself is lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments._models import LABELS, available, settings_for
from headwise import data, pipeline
from headwise.checks import quality
from headwise.progress import Track

CLAIM = "Robustness"
TITLE = "Typos, shuffled words, unfamiliar text"
TYPO_RATE = 0.05  # of letters
RESAMPLES = 2000


@dataclass(frozen=True)
class Size:
    """How much is done."""

    budgets: tuple[str, ...]
    tokens: tuple[int, int, int]
    length: int


SIZES = {
    "tiny": Size(("kv=75%",), (128, 128, 0), 32),
    "small": Size(("kv=75%",), (24_576, 16_384, 1_024), 256),
    "full": Size(("kv=75%", "kv=50%"), (196_608, 65_536, 8_192), 512),
}


def run(size: str, device: str, assets: Path | None, track: Track) -> dict[str, Any]:
    """Every model, every cut, every kind of text."""
    sizes = SIZES[size]
    names = ["embedded"] if size == "tiny" else available(assets, ("embedded", "smollm2"))
    models = {name: _model(name, assets, device, sizes, track) for name in names}
    return {"seeds": [0], "typo_rate": TYPO_RATE, "models": models}


def _model(name: str, assets: Path | None, device: str, sizes: Size, track: Track) -> dict[str, Any]:
    settings = settings_for(name, assets, device, sizes.tokens, sizes.length, budgets=sizes.budgets)
    bench = pipeline.load_source(settings, track)
    looked = pipeline.probe(settings, bench, track)
    blocks = {kind: _blocks(kind, name, assets, bench, sizes) for kind in ("clean", *SHIFTS, "unfamiliar")}
    rows = []
    for budget in sizes.budgets:
        fitted = pipeline.fit(replace(settings, budgets=(budget,)), bench, first=looked)
        found = {
            kind: quality.compare(bench.family, bench.model, fitted.model, tokens)
            for kind, tokens in blocks.items()
            if tokens is not None
        }
        rows += [{"budget": budget, "text": kind, **_row(one, found["clean"])} for kind, one in found.items()]
    return {"label": LABELS[name], "rows": rows}


def _row(found: quality.Comparison, clean: quality.Comparison) -> dict[str, float]:
    """Damage on this text and how much larger it is than on clean text."""
    damage, base = found.loss_after - found.loss_before, clean.loss_after - clean.loss_before
    low, high = difference_interval(damage, base)
    return {
        "loss_before": float(found.loss_before.mean()),
        "damage": float(damage.mean()),
        "damage_error": float(damage.std() / math.sqrt(max(1, len(damage) - 1))),
        "extra": float(damage.mean() - base.mean()),
        "extra_low": low,
        "extra_high": high,
        "kl": float(found.kl.mean()),
        "blocks": len(damage),
    }


def difference_interval(one: np.ndarray, other: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the difference of two means."""
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1) for values in (one, other)]
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975])
    return float(low), float(high)


def typos(text: str, rng: random.Random) -> str:
    """Letters swapped with their neighbour, dropped or doubled, each at a third of the rate."""
    letters, out, i = list(text), [], 0
    while i < len(letters):
        letter = letters[i]
        kind = rng.random() / TYPO_RATE if letter.isalpha() else 1.0
        if kind < 1 / 3 and i + 1 < len(letters):
            out += [letters[i + 1], letter]
            i += 1
        elif 1 / 3 <= kind < 2 / 3:
            pass
        else:
            out += [letter, letter] if kind < 1.0 else [letter]
        i += 1
    return "".join(out)


def shuffled(text: str, rng: random.Random) -> str:
    """The words of every line in another order; indentation stays."""
    lines = []
    for line in text.split("\n"):
        words = line.split()
        rng.shuffle(words)
        lines.append(line[: len(line) - len(line.lstrip())] + " ".join(words))
    return "\n".join(lines)


SHIFTS: dict[str, Callable[[str, random.Random], str]] = {"typos": typos, "shuffled words": shuffled}


def _blocks(kind: str, name: str, assets: Path | None, bench: pipeline.Source, sizes: Size) -> Any:
    """Blocks of one kind of text, as many as there are for evaluation; None where there is no such text here."""
    if kind == "clean":
        return bench.evaluation
    if kind in SHIFTS:
        rng, change = random.Random(0), SHIFTS[kind]
        texts: Iterable[str] = (change(bench.tokenizer.decode(row), rng) for row in bench.evaluation)
    else:
        texts = _unfamiliar(name, assets)
    length = bench.evaluation.shape[1]
    pool = list(islice(texts, 4 * len(bench.evaluation)))
    return data.blocks_of(pool, bench.tokenizer, length, len(bench.evaluation), kind) if pool else None


def _unfamiliar(name: str, assets: Path | None) -> Iterator[str]:
    """English prose for the model of code, code for the model of prose."""
    prose = assets / "text" / "prose.txt" if assets is not None else None
    if name != "embedded":
        yield from data.documents("stdlib", 7)
    elif prose is not None and prose.is_file():
        yield from data.documents(str(prose))
    else:
        for text in data.documents("stdlib", 7):  # what prose there is: the words of comments and docstrings
            yield "\n".join(line.strip("# \t") for line in text.split("\n") if line.lstrip().startswith("#"))


def _fragile(row: dict[str, Any]) -> bool:
    return row["text"] != "clean" and row["extra_low"] > 0


def measured(result: dict[str, Any]) -> str:
    """Damage per kind of text, and what comes on top of the clean text's."""
    lines = []
    for model in result["models"].values():
        for budget in dict.fromkeys(row["budget"] for row in model["rows"]):
            parts = [
                f"{row['text']} {row['damage']:.4f} ± {1.96 * row['damage_error']:.4f}, KL {row['kl']:.4f}"
                + (f" (extra {row['extra']:+.4f}, {row['extra_low']:+.4f} to {row['extra_high']:+.4f})")
                * (row["text"] != "clean")
                for row in model["rows"]
                if row["budget"] == budget
            ]
            lines.append(f"{model['label']}, {budget}: nats per token above the source on {'; '.join(parts)}.")
    rows = [row for model in result["models"].values() for row in model["rows"] if row["text"] != "clean"]
    lines.append(f"The cut model is hurt more than on clean text in {sum(map(_fragile, rows))} of {len(rows)} rows.")
    return "\n".join(f"- {line}" for line in lines)


def draw(result: dict[str, Any], figure: Any) -> None:
    """Damage by kind of text, bars with 95% intervals, one panel per model."""
    from headwise.report.plots import PALETTE

    axes = figure.subplots(1, len(result["models"]), squeeze=False)[0]
    for axis, model in zip(axes, result["models"].values(), strict=True):
        budgets = list(dict.fromkeys(row["budget"] for row in model["rows"]))
        for number, (budget, colour) in enumerate(zip(budgets, PALETTE, strict=False)):
            rows = [row for row in model["rows"] if row["budget"] == budget]
            x = [i + 0.35 * number for i in range(len(rows))]
            errors = [1.96 * row["damage_error"] for row in rows]
            axis.bar(x, [row["damage"] for row in rows], 0.33, yerr=errors, color=colour, capsize=3, label=budget)
        axis.set_xticks(range(len(rows)), [row["text"] for row in rows], rotation=20)
        axis.set_title(model["label"])
        axis.set_xlabel("text")
        axis.set_ylabel("measured damage, nats per token")
        axis.legend(fontsize=7)
