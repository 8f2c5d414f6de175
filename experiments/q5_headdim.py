"""Open question: which head dimension is best at a fixed width on text, with norms of queries and keys and without?

Decoders of Llama's block, alike in width, depth, MLP and so in parameters and FLOPs, differ in the dimension of their
heads alone, from 8 to 128; the number of heads follows. A public replication saw many tiny heads lose, part of it an
effect of the softmax's temperature, which norms of queries and keys with a learned temperature per head remove: so
every dimension is trained both ways. Rates by the same rule for all (`_trials`), several seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points
from experiments._judge import Contest, edges_of, paired, short_of_tokens
from experiments._rates import Ladder
from experiments._stack import Layer, Net
from experiments._tasks import NextToken
from experiments._trials import Trial, run_all
from headwise.progress import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "Dimensions"
TITLE = "Head dimension at a fixed width on text"
USUAL = 64  # the dimension that others are compared with
NATS = 0.01
WAYS = {False: "without norms", True: "with norms"}
LADDER = Ladder((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3))


class Plan(NamedTuple):
    """What one size trains."""

    width: int
    depth: int
    dims: tuple[int, ...]
    length: int
    batch: int
    valid_rows: int
    trial: Trial


PLANS = {
    "tiny": Plan(16, 1, (64 // 8, 16), 16, 4, 8, Trial(5, 3, (0, 1), Ladder((1e-3,), (1e-3,)))),
    "small": Plan(128, 2, (8, 16, 32, 64), 128, 16, 64, Trial(200, 60, (0, 1, 2), LADDER)),
    "full": Plan(384, 4, (64, 8, 128, 16, 32), 256, 32, 256, Trial(1500, 375, (0, 1, 2, 3, 4), LADDER)),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every dimension both ways; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    texts = _data.texts("text", size, assets, where)
    task = NextToken(texts, plan.length, plan.batch, plan.valid_rows)
    nets = {
        key(dim, normed): Net(
            plan.width,
            (Layer(plan.width // dim, dim, 8 * plan.width // 3 // 32 * 32 or 32),) * plan.depth,
            plan.length,
            texts.vocabulary,
            causal=True,
            rotary=True,
            qk_norm=normed,
        )
        for dim in plan.dims
        for normed in WAYS
    }
    models, left = run_all(nets, task, plan.trial, parts, track)
    for name, model in models.items():
        model |= {"head_dim": nets[name].layers[0].dim, "normed": nets[name].qk_norm}
    return {
        "seeds": list(plan.trial.seeds),
        "tokens": plan.trial.steps * plan.batch * plan.length,
        "length": plan.length,
        "vocabulary": texts.vocabulary,
        "models": models,
        "left_out": left,
    }


def key(dim: int, normed: bool) -> str:
    return f"{dim} {WAYS[normed]}"


def contests(found: Mapping[str, Any]) -> list[Contest]:
    """Every dimension against the usual one (or the largest there is), with norms and without."""
    made = []
    for normed, words in WAYS.items():
        models = {m["head_dim"]: (name, m) for name, m in found["models"].items() if m["normed"] is normed}
        if not models:
            continue
        base = USUAL if USUAL in models else max(models)
        for dim, (name, model) in sorted(models.items()):
            if dim != base:
                other, usual = models[base]
                failed = short_of_tokens(found["tokens"], usual["parameters"]) + edges_of(found["models"], name, other)
                what = f"heads of {dim} instead of {base}, {words}:"
                made.append(paired(what, usual["loss"], model["loss"], NATS, failed=failed))
    return made


def items(found: Mapping[str, Any]) -> Iterator[Any]:
    """Comparisons for advice, which speaks for more heads of fewer dimensions: heads above the usual turn round."""
    from experiments._advice import Item, Where

    any_model = next(iter(found["models"].values()))
    sizes = ((any_model["width"],) * 2, (any_model["depth"],) * 2, (found["length"],) * 2)
    for contest in contests(found):
        dim, base = (int(word.rstrip(",")) for word in contest.what.split() if word.rstrip(",").isdigit())
        if dim > base:
            contest = contest._replace(what=f"{contest.what.rstrip(':')}, turned round", gain=-contest.gain)
        yield Item(contest._replace(what=contest.what.rstrip(":")), "nats", Where("text", *sizes), "q5_headdim")


def measured(result: dict[str, Any]) -> str:
    """Losses by dimension, both ways."""
    told = "; ".join(
        f"{m['head_dim']} ({m['heads']} heads) {WAYS[m['normed']]} {_points.mean(m['loss']).spelled()}"
        for m in sorted(result["models"].values(), key=lambda model: (model["normed"], model["head_dim"]))
    )
    first = next(iter(result["models"].values()))
    return (
        f"Held-out loss in nats per token by head dimension, {len(result['seeds'])} seeds, {result['tokens']:,} "
        "tokens, "
        f"{first['depth']} layers of width {first['width']}, {first['parameters'] / 1e6:.1f}M: {told}."
        f"{_rates(result['models'])}{_points.edges(result['models'])}{_points.left_out(result)}"
    )


def _rates(models: Mapping[str, Any]) -> str:
    """Which models took another rate than most, and what that means."""
    taken = [model["rate"] for model in models.values()]
    usual = max(set(taken), key=taken.count)
    others = ", ".join(f"{name} {model['rate']:g}" for name, model in models.items() if model["rate"] != usual)
    told = f" Most learned best at a rate of {usual:g} in a shorter training, but {others}: part of what these differ"
    return f"{told} by can be due to their rate, which was not tried for the whole training." if others else ""


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Loss over head dimension, a line per way."""
    axes = figure.subplots()
    for number, (normed, label) in enumerate(WAYS.items()):
        mine = sorted((m for m in result["models"].values() if m["normed"] is normed), key=lambda m: int(m["head_dim"]))
        if mine:
            _points.bars(axes, [m["head_dim"] for m in mine], [_points.mean(m["loss"]) for m in mine], label, number)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("head dimension at a fixed width")
    axes.set_ylabel("held-out loss (nats per token)")
    axes.legend(fontsize=8)
