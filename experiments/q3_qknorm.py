"""Open question: do norms of queries and keys make keys harder to cut?

Two small decoders are trained on the same text from the same seeds, alike but for the norms of queries and keys
(Qwen3's architecture with them, Llama's without). Then a quarter of all key dimensions goes, nothing else, by the exact
plan with the closed-form refit, and the damage is measured on held-out text. What counts is the ratio of the two
damages, with a bootstrap interval over seeds and blocks: norms forbid dropping rotary pairs, so keys are projected
after them only.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments._provenance import used
from headwise import data, families, pipeline
from headwise.checks import quality
from headwise.progress import Track
from headwise.runs.folder import Settings
from headwise.training.loop import FitSettings, fit, next_token
from headwise.training.order import Order

CLAIM = "Norms"
TITLE = "Norms of queries and keys"
BUDGET = "kv=87.5%"  # half of the cache is keys: a quarter of them
MODELS = {"with norms": "Qwen3", "without norms": "Llama"}
RATE, WARM_UP = 2e-3, 100  # highest learning rate; steps during which it rises
RESAMPLES = 2000


@dataclass(frozen=True)
class Size:
    """How much is done."""

    layers: int
    seeds: int
    steps: int
    batch: int  # blocks
    length: int
    tokens: tuple[int, int, int]  # calibration, evaluation, measured prices


SIZES = {
    "tiny": Size(1, 1, 2, 2, 32, (128, 128, 0)),
    "small": Size(2, 1, 300, 8, 128, (16_384, 8_192, 1_024)),
    "full": Size(6, 3, 1_500, 48, 512, (131_072, 65_536, 8_192)),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: dict[str, Any]) -> dict[str, Any]:
    """Train, cut and measure, both kinds from every seed."""
    sizes = SIZES[size]
    texts = corpus(assets)
    for seed in range(sizes.seeds):
        for kind in MODELS:
            if f"{kind} {seed}" not in parts:
                parts[f"{kind} {seed}"] = _measured(kind, seed, sizes, device, texts, track)
    rows = [{"kind": k, "seed": s, **parts[f"{k} {s}"]} for s in range(sizes.seeds) for k in MODELS]
    tokens = sizes.steps * sizes.batch * sizes.length
    return {"seeds": list(range(sizes.seeds)), "budget": BUDGET, "trained_tokens": tokens, "rows": rows}


def corpus(assets: Path | None) -> tuple[str, str | None]:
    """Text for training and calibration, and for evaluation: the embedded model's corpus, or the standard library."""
    folder = assets / "corpus" if assets is not None else None
    if folder is not None and used(folder).is_dir():
        return str(folder / "train.txt.xz"), str(folder / "valid.txt.xz")
    return "stdlib", None


def _measured(
    kind: str, seed: int, sizes: Size, device: str, texts: tuple[str, str | None], track: Track
) -> dict[str, Any]:
    """One model from its training to the damage."""
    with tempfile.TemporaryDirectory() as folder:
        loss = _train(kind, seed, sizes, device, texts[0], Path(folder))
        calibration, evaluation, prices = sizes.tokens
        settings = Settings(
            model=folder, budgets=(BUDGET,), allow=("qk",), data=texts[0], eval=texts[1], seed=seed, device=device,
            tokens=calibration, eval_tokens=evaluation, swap_tokens=prices, length=sizes.length,
        )  # fmt: skip
        bench = pipeline.load_source(settings, track)
        looked = pipeline.probe(settings, bench, track, diagnose=False)
        fitted = pipeline.fit(settings, bench, first=looked)
        found = quality.compare(bench.family, bench.model, fitted.model, bench.evaluation)
    damage = found.loss_after - found.loss_before
    return {
        "train_loss": loss,
        "loss_before": float(found.loss_before.mean()),
        "kl": float(found.kl.mean()),
        "damage": float(damage.mean()),
        "blocks": [round(float(d), 6) for d in damage],
        "keys": [layer.qk_dim for layer in fitted.plan.target.layers],
    }


def _model(kind: str, sizes: Size, device: str) -> Any:
    import transformers

    config = getattr(transformers, f"{MODELS[kind]}Config")(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=sizes.layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)


def _train(kind: str, seed: int, sizes: Size, device: str, text: str, folder: Path) -> float:
    """Train a model and save it with the embedded model's tokenizer; returns its mean loss over the last tenth."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(families.locate(families.EMBEDDED)[0])
    blocks = _tokens(text, tokenizer, sizes).to(device)
    torch.manual_seed(seed)
    model = _model(kind, sizes, device)
    order = Order(len(blocks), sizes.batch, seed, device)
    settings = FitSettings(
        sizes.steps, RATE, min(1.0, WARM_UP / sizes.steps), last_rate=0.05, point_every=max(1, sizes.steps // 10)
    )
    points = fit(model, lambda step: blocks[order(step)].long(), settings, next_token)
    with families.quietly():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return points[-1].loss


_read: dict[tuple[str, int], torch.Tensor] = {}


def _tokens(text: str, tokenizer: Any, sizes: Size) -> torch.Tensor:
    """The text as blocks; read once."""
    wanted = (text, sizes.length)
    if wanted not in _read:
        count = min(sizes.steps * sizes.batch, 20_000)
        _read[wanted] = data.blocks_of(data.documents(text), tokenizer, sizes.length + 1, count, text).short()
    return _read[wanted]


def ratio(result: dict[str, Any]) -> tuple[float, float, float]:
    """Damage with norms over damage without, and its 95% bootstrap interval over seeds and blocks."""
    draws = np.random.default_rng(0)
    both = {kind: [np.array(r["blocks"]) for r in result["rows"] if r["kind"] == kind] for kind in MODELS}

    def mean(runs: list[np.ndarray]) -> float:
        picked = [runs[i] for i in draws.integers(0, len(runs), len(runs))]
        return float(np.mean([run[draws.integers(0, len(run), len(run))].mean() for run in picked]))

    found = [mean(both["with norms"]) / mean(both["without norms"]) for _ in range(RESAMPLES)]
    low, high = np.quantile(found, [0.025, 0.975])
    middle = [float(np.mean([run.mean() for run in both[kind]])) for kind in MODELS]
    return middle[0] / middle[1], float(low), float(high)


def measured(result: dict[str, Any]) -> str:
    """Losses before the cut, damages, and their ratio."""
    lines = []
    for kind in MODELS:
        rows = [row for row in result["rows"] if row["kind"] == kind]
        before, damages = [row["loss_before"] for row in rows], [row["damage"] for row in rows]
        lines.append(
            f"{kind}: loss {np.mean(before):.3f} before; a quarter fewer keys cost {np.mean(damages):.4f} nats "
            f"per token (random seeds {', '.join(f'{d:.4f}' for d in damages)})."
        )
    middle, low, high = ratio(result)
    lines.append(
        f"Ratio of measured damages, with norms to without: {middle:.2f} (95% interval {low:.2f} to {high:.2f})."
    )
    return "\n".join(f"- {line}" for line in lines)


def draw(result: dict[str, Any], figure: Any) -> None:
    """Damage of every seed, side by side."""
    from headwise.report.plots import PALETTE

    axis = figure.subplots()
    for number, (kind, colour) in enumerate(zip(MODELS, PALETTE, strict=False)):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        errors = [1.96 * np.std(row["blocks"]) / math.sqrt(len(row["blocks"])) for row in rows]
        x = [row["seed"] + 0.36 * number for row in rows]
        axis.bar(x, [row["damage"] for row in rows], 0.34, yerr=errors, color=colour, capsize=3, label=kind)
    axis.set_xticks([seed + 0.18 for seed in result["seeds"]], [f"seed {seed}" for seed in result["seeds"]])
    axis.set_xlabel("training run")
    axis.set_ylabel("measured damage, nats per token")
    axis.legend(fontsize=8)
