"""Which moments of keys hold at a long context? Every head's keys cut to half by several of them; damage by length.

    python benchmarks/key_cuts.py embedded --out benchmarks/results/key-cuts-embedded.json

Heads are cut by themselves, all layers alike, values not at all, so that only the choice of directions differs. Moments
are taken from short rows at random places of the context: about the mean key of each row (as cuts are made), about the
mean of all rows, and with the two halves of each row at places far apart; and from rows of the whole context, which see
everything that is served. The last way makes queries larger, because a cut makes attention flatter. As many tokens are
read in every way. `benchmarks/lengths.py --print` shows it on docs/LENGTHS.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

KEPT = (0.75, 0.5)  # shares of a head's directions of keys
LARGER = 1.2  # queries, in the last way
ROW, ALL, HALVES, WHOLE = "each row", "all rows", "each row, its halves far apart", "each row, of the whole context"
SCALED = f"each row, queries times {LARGER:g}"


def apart(reader: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions of rows whose halves begin at two places of the context; every token still sees all before it."""
    count = rows.shape[1]
    draw = torch.Generator().manual_seed(int(rows.sum()))
    starts = torch.randint(reader.context - count + 1, (len(rows), 2), generator=draw).sort(1).values
    places = starts.repeat_interleave(-(-count // 2), 1)[:, :count] + torch.arange(count)
    return {"position_ids": places, "attention_mask": torch.ones_like(rows)}  # a mask: else a jump begins a new text


@torch.no_grad()
def moments(family: Any, model: Any, rows: torch.Tensor, context: int, far: bool = False) -> list[dict[str, Any]]:
    """Per layer: `gram_q`, and moments of keys about each row's mean and about that of all."""
    from headwise.data import batches
    from headwise.families._watch import watching

    layers, reader = family.blocks(model), family.offset(context)
    if far:
        reader.positions = lambda part: apart(reader, part)
    sums: list[dict[str, Any]] = [{} for _ in layers]

    def see(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        q, k = q.double(), k.double()
        own = k - k.mean(2, keepdim=True)
        queries = (q.mT @ q).sum(0).unflatten(0, (k.shape[1], -1)).sum(1)
        found = {"gram_q": queries, ROW: (own.mT @ own).sum(0), ALL: (k.mT @ k).sum(0), "mean": k.sum((0, 2))}
        for name, part in found.items():
            sums[layer][name] = sums[layer].get(name, 0) + part / rows.numel()

    with watching(layers, see, None):
        for part in batches(rows, 2048):
            reader.read(model, part)
    for found in sums:
        mean = found.pop("mean")
        found[ALL] = found[ALL] - mean[..., :, None] * mean[..., None, :]
    return sums


def cut(family: Any, model: Any, found: list[dict[str, Any]], about: str, kept: float, larger: float = 1.0) -> Any:
    """The model with so many directions of keys in every head."""
    from headwise.cuts import reshape
    from headwise.types import LayerKeep

    shape = family.shape_of(model.config)
    target = shape.with_layers(tuple(replace(layer, qk_dim=round(kept * layer.qk_dim)) for layer in shape.layers))
    plan: Any = SimpleNamespace(source=shape, target=target, keep=[LayerKeep()] * len(shape.layers))
    grams = [{"gram_q": layer["gram_q"], "gram_k": layer[about]} for layer in found]
    made = reshape(family, model, plan, grams)
    for block in family.blocks(made):
        block.attention.q_down_GWK.data *= larger
    return made


@torch.no_grad()
def losses(family: Any, model: Any, rows: torch.Tensor) -> torch.Tensor:
    """The mean loss of every row."""
    found = []
    for part in rows.split(max(1, 2048 // rows.shape[1])):
        logits = family.run(model, part)[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="none")
        found.append(loss.view(len(part), -1).double().mean(1))
    return torch.cat(found)


def measured(bench: Any, long: torch.Tensor, rows: dict[int, torch.Tensor], context: int) -> list[dict[str, Any]]:
    """Damage of every way of choosing directions, by length, with its standard error over rows."""
    family, model = bench.family, bench.model
    short = moments(family, model, bench.calibration, context)
    ways = [
        (ROW, short, ROW, 1.0), (ALL, short, ALL, 1.0), (SCALED, short, ROW, LARGER),
        (HALVES, moments(family, model, bench.calibration, context, far=True), ROW, 1.0),
        (WHOLE, moments(family, model, long, context), ROW, 1.0),
    ]  # fmt: skip
    before = {length: losses(family, model, part) for length, part in rows.items()}
    told = []
    for kept in KEPT:
        for name, found, about, larger in ways:
            made = cut(family, model, found, about, kept, larger)
            damage = {length: losses(family, made, part) - before[length] for length, part in rows.items()}
            row = {str(n): [float(d.mean()), float(d.std() / len(d) ** 0.5)] for n, d in damage.items()}
            told.append({"kept": kept, "about": name, "damage": row})
            print(kept, name, row, flush=True)
    return told


def main() -> None:
    """Measure and write."""
    from lengths import about_machine

    from headwise import pipeline
    from headwise.checks import _lengths
    from headwise.runs.settings import Settings

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--eval-tokens", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    settings = Settings(
        asked.model, ("kv=75%",), data=asked.data, eval=asked.eval, tokens=asked.tokens, length=asked.length,
        eval_tokens=asked.eval_tokens, swap_tokens=0, pool="none", device="cpu",
    )  # fmt: skip
    bench = pipeline.load_source(settings)
    context = bench.family.longest(bench.model.config)
    long = pipeline.load_source(replace(settings, length=context)).calibration
    rows, _ = _lengths.rows_by_length(bench.long.tokens, bench.long.start, asked.length, context, asked.eval_tokens)
    rows = {length: part for length, part in rows.items() if length in (asked.length, context)}
    about = {"name": asked.name or Path(asked.model).stem, "context": context, "length": asked.length}
    about |= {"tokens": bench.calibration.numel(), "eval_tokens": rows[context].numel()}
    about |= {"data": Path(bench.described).name, **about_machine(bench.model.device)}
    about["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    cuts = measured(bench, long, rows, context)
    asked.out.write_text(json.dumps(about | {"cuts": cuts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
