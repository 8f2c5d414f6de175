"""Open question: trained from scratch at equal FLOPs, are layers that differ better than layers alike?

The first paper proposes more heads in early layers, fewer and smaller ones in later layers, for new models. Decoders of
Llama's block share width, depth and MLP; their attention layers share one sum of heads x dimension, so that parameters
and FLOPs are equal to the last digit, and differ in how that sum is spread: evenly, falling with depth, rising, in many
small heads early and few large ones late, the reverse of that, and as the exact allocation spread it when it cut the
embedded model (committed result of A8). Rates by the same rule for all (`_trials`), several seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points
from experiments._judge import Contest, edges_of, paired, short_of_tokens
from experiments._provenance import ROOT, used
from experiments._rates import Ladder
from experiments._stack import Layer, Net
from experiments._tasks import NextToken
from experiments._trials import Trial, run_all
from headwise.errors import DataError
from headwise.files.json import read_object
from headwise.progress import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "Layers"
TITLE = "Layers that differ, trained from scratch"
FLAT = "uniform"
CLAIMED = ("early more, late fewer and smaller", "early many small, late few large", "taper")  # the paper's direction
NATS = 0.01
HEAD = 64
LADDER = Ladder((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (1e-3, 2e-3, 4e-3))
Heads = tuple[tuple[int, int], ...]  # per layer: heads, their dimension


class Plan(NamedTuple):
    """What one size trains."""

    width: int
    depth: int
    length: int
    batch: int
    valid_rows: int
    trial: Trial


PLANS = {
    "tiny": Plan(64, 4, 16, 4, 8, Trial(5, 3, (0, 1), Ladder((1e-3,), (1e-3,)))),
    "small": Plan(128, 6, 128, 16, 64, Trial(200, 60, (0, 1, 2), LADDER)),
    "full": Plan(256, 12, 256, 32, 256, Trial(2400, 600, (0, 1, 2, 3, 4), LADDER)),
}


def arms(width: int, depth: int) -> dict[str, Heads]:
    """Ways to spread the same attention over layers; every arm sums to width x depth."""
    half, heads, dim = depth // 2, max(1, width // HEAD), min(HEAD, width)
    many, few = (width // 16, 16), (max(1, width // 128), min(128, width))
    more, less = (heads * 3, dim // 2), (heads, dim // 2)  # 1.5 and 0.5 of the width
    spread: dict[str, Heads] = {
        FLAT: ((heads, dim),) * depth,
        CLAIMED[0]: (more,) * half + (less,) * (depth - half),
        CLAIMED[1]: (many,) * half + (few,) * (depth - half),
        "taper": _of_sizes(_falling(width, depth)),
        "reversed taper": _of_sizes(_falling(width, depth)[::-1]),
        "early few large, late many small": (few,) * half + (many,) * (depth - half),
        "exact": _of_sizes(_exact(width, depth)),
    }
    return spread


def _falling(width: int, depth: int) -> list[int]:
    """Sizes in steps of 16 that fall evenly from 1.5 to 0.5 of the width."""
    return _stepped([1.5 - place / max(1, depth - 1) for place in range(depth)], width, depth)


def _stepped(shares: list[float], width: int, depth: int) -> list[int]:
    """Sizes in steps of 16 nearest to shares of the width, with the sum of equal sizes."""
    sizes = [max(16, round(share * width / 16) * 16) for share in shares]
    while (over := sum(sizes) - width * depth) != 0:
        able = [place for place in range(depth) if over < 0 or sizes[place] > 16]
        step = -16 if over > 0 else 16
        nearest = min(able, key=lambda place: abs(sizes[place] + step - shares[place] * width))
        sizes[nearest] += step
    return sizes


def _of_sizes(sizes: list[int]) -> Heads:
    """Heads of 32 where they divide a size, of 16 otherwise."""
    return tuple((size // 32, 32) if size % 32 == 0 else (size // 16, 16) for size in sizes)


def _exact(width: int, depth: int) -> list[int]:
    """How the exact allocation spread attention over the depth of the embedded model, stretched to this depth."""
    path = used(ROOT / "experiments" / "results" / "a8_taper.json")
    found = read_object(path, DataError, "restore it from the repository")["found"]
    rows = [row for row in found["models"]["embedded"]["rows"] if row["strategy"] == "exact"]
    kept = [heads * (qk + v) / 2 for heads, _, _, qk, v in min(rows, key=lambda row: float(row["spent"]))["sizes"]]
    mean = sum(kept) / len(kept)
    return _stepped([kept[place * len(kept) // depth] / mean for place in range(depth)], width, depth)


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every arm; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    texts = _data.texts("text", size, assets, where)
    task = NextToken(texts, plan.length, plan.batch, plan.valid_rows)
    spread = arms(plan.width, plan.depth)
    mlp = 8 * plan.width // 3 // 32 * 32
    nets = {
        name: Net(
            plan.width,
            tuple(Layer(heads, dim, mlp) for heads, dim in layers),
            plan.length,
            texts.vocabulary,
            causal=True,
            rotary=True,
        )
        for name, layers in spread.items()
    }
    models, left = run_all(nets, task, plan.trial, parts, track)
    for name, model in models.items():
        model["layers"] = [list(layer) for layer in spread[name]]
    return {
        "seeds": list(plan.trial.seeds),
        "tokens": plan.trial.steps * plan.batch * plan.length,
        "length": plan.length,
        "vocabulary": texts.vocabulary,
        "models": models,
        "left_out": left,
    }


def contests(found: Mapping[str, Any], claimed: bool = True) -> list[Contest]:
    """Arms against layers alike: those in the paper's direction, or all."""
    models, made = found["models"], []
    for name, model in models.items():
        if name in (CLAIMED if claimed else models) and name != FLAT:
            flat = models[FLAT]
            failed = short_of_tokens(found["tokens"], flat["parameters"]) + edges_of(models, FLAT, name)
            made.append(paired(f"{name} against {FLAT}:", flat["loss"], model["loss"], NATS, failed=failed))
    return made


def items(found: Mapping[str, Any]) -> Iterator[Any]:
    """Comparisons for advice."""
    from experiments._advice import Item, Where

    flat = found["models"][FLAT]
    where = Where("text", (flat["width"],) * 2, (flat["depth"],) * 2, (found["length"],) * 2)
    for contest in contests(found, claimed=False):
        yield Item(contest._replace(what=contest.what.rstrip(":")), "nats", where, "q6_scratch")


def measured(result: dict[str, Any]) -> str:
    """Losses of all arms, and their differences from layers alike."""
    models = result["models"]
    flat = models[FLAT]
    table = "; ".join(
        f"{name} {_points.mean(m['loss']).spelled()}"
        + (f" ({_points.difference(m['loss'], flat['loss']).signed()})" if name != FLAT else "")
        for name, m in models.items()
    )
    return (
        f"Held-out loss in nats per token (difference from layers alike), {len(result['seeds'])} seeds, "
        f"{result['tokens']:,} tokens, {flat['depth']} layers of width {flat['width']}, "
        f"{flat['parameters'] / 1e6:.1f}M "
        f"parameters in every arm: {table}.{_points.edges(models)}{_points.left_out(result)}"
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Loss of every arm, and how each spreads its attention."""
    left, right = figure.subplots(1, 2)
    for number, (name, model) in enumerate(result["models"].items()):
        _points.bars(left, [number], [_points.mean(model["loss"])], name, number, line=False)
        right.plot([heads * dim for heads, dim in model["layers"]], marker=".", label=name)
    left.set_xticks(range(len(result["models"])), list(result["models"]), rotation=60, ha="right", fontsize=6)
    left.set_xlabel("arm")
    left.set_ylabel("held-out loss (nats per token)")
    right.set_xlabel("layer")
    right.set_ylabel("heads x dimension")
    right.legend(fontsize=5)
