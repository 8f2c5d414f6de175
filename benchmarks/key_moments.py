"""Why damage grows with length where every head is cut by itself: what the moments of keys see of a whole context.

    python benchmarks/key_moments.py MODEL --data TEXT --out benchmarks/results/key-moments-smollm2.json

Directions of keys are chosen by moments about the mean key of each calibration row, because softmax ignores what is
added to all keys of a text. Rotary pairs that turn slowly hardly move within a short row, so that they count as such a
mean; over a long text they move. Rows here begin at places that lie evenly over the context. Measured per layer: the
share of the logits' variance over the context that lies between rows; and for moments about the mean of each row and
about the mean of all, how much of that variance is lost when so many directions are kept. `benchmarks/lengths.py
--print` shows it on docs/LENGTHS.md.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

KEPT = (0.75, 0.625, 0.5)  # shares of a head's directions
Moments = dict[str, torch.Tensor]


@torch.no_grad()
def collected(family: Any, model: Any, rows: torch.Tensor, context: int) -> list[Moments]:
    """Per layer and key/value head: moments of queries, of keys about the mean of their row and about that of all."""
    from headwise.families._watch import watching

    layers = family.blocks(model)
    sums: list[Moments] = [{} for _ in layers]

    def see(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        q, k = q[0].double(), k[0].double()
        own = k - k.mean(1, keepdim=True)
        queries = (q.mT @ q).unflatten(0, (len(k), -1)).sum(1)
        for name, part in {"q": queries, "k": k.mT @ k, "row": own.mT @ own, "mean": k.sum(1)}.items():
            sums[layer][name] = sums[layer].get(name, torch.zeros_like(part)) + part

    starts = torch.linspace(0, context - rows.shape[1], len(rows)).long()
    with watching(layers, see, None):
        for row, start in zip(rows, starts, strict=True):
            places = torch.arange(rows.shape[1]) + start
            model(input_ids=row[None], position_ids=places[None], use_cache=False, logits_to_keep=1)
            print(f"row at {int(start)}", flush=True)
    for found in sums:
        mean = found.pop("mean") / rows.numel()
        found |= {name: part / rows.numel() for name, part in found.items()}
        found["all"] = found.pop("k") - mean[..., :, None] * mean[..., None, :]
    return sums


def judged(found: Moments) -> dict[str, Any]:
    """Shares of the logits' variance: between rows, and lost by directions of either kind, within rows and in all."""
    from headwise.linalg import balanced

    def variance(gram: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        return torch.einsum("gji,gjk,gkl,gli->g", error, found["q"], error, gram)

    whole = torch.eye(found["q"].shape[-1], dtype=torch.float64).expand_as(found["q"])
    told: dict[str, Any] = {
        "between": float((1 - variance(found["row"], whole) / variance(found["all"], whole)).mean())
    }
    for kept in KEPT:
        for name in ("row", "all"):
            p_q, p_k, _ = balanced(found["q"], found[name])
            size = round(kept * whole.shape[-1])
            error = whole - p_q[..., :size] @ p_k[..., :size].mT
            for where in ("row", "all"):
                lost = variance(found[where], error) / variance(found[where], whole)
                told[f"{kept:g} by {name} in {where}"] = float(lost.mean())
    return told


def main() -> None:
    """Measure and write."""
    from lengths import about_machine

    from headwise import families

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=14)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    model, reader = families.load(asked.model)
    family = families.family_of(model.config)
    model, context = family.tailor(model).eval(), family.longest(model.config)
    with asked.data.open() as file:
        text = file.read(12 * asked.rows * asked.length)
    rows = torch.tensor(reader(text)["input_ids"][: asked.rows * asked.length]).view(asked.rows, -1)
    layers = [judged(found) for found in collected(family, model, rows, context)]
    about = {"name": asked.name or Path(asked.model).stem, "context": context, "rows": asked.rows}
    about |= {"length": asked.length, "data": asked.data.name, **about_machine(model.device)}
    about["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    asked.out.write_text(json.dumps(about | {"layers": layers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
