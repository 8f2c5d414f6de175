"""Sentence embeddings after cutting attention, without any training: are they the same, and as good?

    python benchmarks/embeddings.py MODEL DATA --out benchmarks/results/embeddings-minilm.json

MODEL is an embedding model such as all-MiniLM-L6-v2; DATA holds `glue/`. Calibrates on training sentences of SST-2,
CoLA, MRPC and RTE. Measured on the development set of STS-B, of which calibration sees nothing: the cosine of every
embedding to the source's, and the Spearman correlation of similarities with the human scores. Intervals are 95%
bootstraps over sentences or pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
import transformers
from scipy.stats import spearmanr

from headwise import budgets, pipeline
from headwise.checks import quality, speed
from headwise.runs.settings import Settings
from headwise.types import ModelShape

COLUMNS = {"SST-2": (0,), "CoLA": (3,), "MRPC": (3, 4), "RTE": (1, 2)}  # where the sentences are
PER_SET = 2500
METHODS: dict[str, dict[str, Any]] = {
    "uniform": dict(strategy="uniform", heal="none"),
    "uniform + refit": dict(strategy="uniform", heal="refit"),
    "exact + refit": dict(strategy="exact", heal="refit"),
}


class Pairs(NamedTuple):
    """Sentence pairs and how alike people found them."""

    first: list[str]
    second: list[str]
    score: np.ndarray


def rows_of(path: Path) -> list[list[str]]:
    """The cells of a tab-separated file, its first line left out."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[1:]]


def calibration_text(glue: Path) -> str:
    """Training sentences of several sets, mixed."""
    draw, found = random.Random(0), []
    for name, columns in COLUMNS.items():
        sentences = [row[c].strip() for row in rows_of(glue / name / "train.tsv") for c in columns if c < len(row)]
        sentences = [sentence for sentence in sentences if len(sentence) > 30]
        draw.shuffle(sentences)
        found += sentences[:PER_SET]
    draw.shuffle(found)
    return "\n".join(found)


def similarity_pairs(path: Path) -> Pairs:
    """STS-B."""
    rows = [row for row in rows_of(path) if len(row) > 9]
    return Pairs([r[7] for r in rows], [r[8] for r in rows], np.array([float(r[9]) for r in rows]))


@torch.no_grad()
def embeddings(bench: pipeline.Source, model: Any, texts: list[str], rows: int = 64) -> np.ndarray:
    """Unit embeddings, in padded batches as users run them; rows of like length together."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        batch = bench.tokenizer([texts[i] for i in chosen], padding=True, truncation=True, return_tensors="pt")
        stream, mask = model(**batch.to(model.device)).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        pooled = stream[:, 0] if bench.task.pooling == "first" else (stream * mask).sum(1) / mask.sum(1)
        for index, row in zip(chosen, torch.nn.functional.normalize(pooled, dim=-1).double().cpu(), strict=True):
            found[index] = row
    return torch.stack(found).numpy()


def spearman_change(before: np.ndarray, after: np.ndarray, score: np.ndarray) -> dict[str, float]:
    """Both correlations and the interval of their difference, in points (hundredths)."""
    draw, count = np.random.default_rng(0), len(score)

    def points(similarity: np.ndarray, rows: Any = slice(None)) -> float:
        return 100 * float(spearmanr(similarity[rows], score[rows]).statistic)

    draws = [draw.integers(0, count, count) for _ in range(1000)]
    low, high = np.quantile([points(after, rows) - points(before, rows) for rows in draws], [0.025, 0.975])
    found = {"spearman_before": points(before), "spearman_after": points(after)}
    return {**found, "change": points(after) - points(before), "change_low": float(low), "change_high": float(high)}


def judge(bench: pipeline.Source, model: Any, pairs: Pairs, source: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """A model's embeddings beside the source's."""
    own = embeddings(bench, model, pairs.first), embeddings(bench, model, pairs.second)
    cosines = np.concatenate([(a * b).sum(-1) for a, b in zip(source, own, strict=True)])
    low, high = quality.interval(cosines)
    similarity = [(first * second).sum(-1) for first, second in (source, own)]
    found = {"cosine": float(cosines.mean()), "cosine_low": low, "cosine_high": high}
    return {
        **found,
        "cosine_lowest_percent": float(np.quantile(cosines, 0.01)),
        **spearman_change(*similarity, pairs.score),
    }


def measure(settings: Settings, pairs: Pairs) -> dict[str, Any]:
    """Every method at the budget; the source is probed once."""
    bench = pipeline.load_source(settings)
    source = embeddings(bench, bench.model, pairs.first), embeddings(bench, bench.model, pairs.second)
    looked = pipeline.probe(settings, bench, diagnose=False)
    rows = []
    for name, method in METHODS.items():
        start = time.perf_counter()
        fitted = pipeline.fit(replace(settings, **method), bench, first=looked)
        held_out = quality.compare(bench.family, bench.model, fitted.model, bench.evaluation, task=bench.task)
        rows.append(
            {
                "method": name,
                **_shares(fitted.plan.source, fitted.plan.target),
                **judge(bench, fitted.model, pairs, source),
                "held_out_cosine": held_out.summary()["cosine"],
                "predicted_cosine": 1 - fitted.rehearsed,
                "sizes": [[layer.query_heads, layer.qk_dim, layer.v_dim] for layer in fitted.plan.target.layers],
                "seconds": time.perf_counter() - start,
            }
        )
        print(_line(rows[-1]), flush=True)
    facts = {"calibration_tokens": looked[0].tokens, "probe_seconds": looked[0].seconds, "pairs": len(pairs.score)}
    return {**facts, "hardware": speed.machine(bench.model.device), "rows": rows}


def _shares(before: ModelShape, after: ModelShape) -> dict[str, float]:
    """What is left of attention's parameters and of all."""
    names = {"attention_parameters_kept": "attention_params=100%", "parameters_kept": "params=100%"}
    limits = {key: budgets.parse(text, before) for key, text in names.items()}
    return {key: budgets.price(limit, after) / limit.limit for key, limit in limits.items()}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['method']:16} attention {row['attention_parameters_kept']:.1%}  cosine {row['cosine']:.4f} "
        f"({row['cosine_low']:.4f} to {row['cosine_high']:.4f})  Spearman {row['spearman_before']:.2f} -> "
        f"{row['spearman_after']:.2f} ({row['change']:+.2f}; {row['change_low']:+.2f} to {row['change_high']:+.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--budget", default="attention_params=75%")
    parser.add_argument("--allow", default="qk,v")
    parser.add_argument("--tokens", type=int, default=49_152)
    parser.add_argument("--swap-tokens", type=int, default=2_048)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    glue = asked.data / "glue"
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "sentences.txt"
        text.write_text(calibration_text(glue))
        settings = Settings(
            model=asked.model, budgets=(asked.budget,), data=str(text), allow=tuple(asked.allow.split(",")),
            tokens=asked.tokens, eval_tokens=8_192, swap_tokens=asked.swap_tokens, length=asked.length,
            device=asked.device,
        )  # fmt: skip
        found = measure(settings, similarity_pairs(glue / "STS-B" / "dev.tsv"))
    versions = {
        name: module.__version__
        for name, module in (("torch", torch), ("transformers", transformers), ("scipy", scipy))
    }
    kept = {name: getattr(settings, name) for name in ("budgets", "allow", "tokens", "swap_tokens", "length", "seed")}
    result = {
        "model": Path(asked.model).name,
        "settings": kept,
        "calibration": "training sentences of SST-2, CoLA, MRPC and RTE",
        "evaluation": "STS-B, development set",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"python": sys.version.split()[0], **versions},
        **found,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
