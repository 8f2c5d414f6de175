"""B6: does a decoder with 4 layers of 16 heads beat one with 12 layers of 12 heads?

Decoders in the manner of GPT-2 (learned positions, GELU, tied embedding; no biases, norms without gains) learn stories
that stories15M wrote, the kind of text that the paper trains on; the writer's own loss on them is the lowest there is,
so one sees how far every model is from it. Beside the pair at a third of the paper's parameters stand controls: the
lean shape with the deep one's heads and the deep one with the lean one's (is it the heads?), a wide lean model with the
deep one's parameters, a narrow deep model with the lean one's, the lean model trained for as many FLOPs as the deep,
and the paper's own pair of 89M parameters. All have the same data in the same order and a rate by the same rule
(`_trials`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points
from experiments._rates import Ladder
from experiments._stack import Net, even
from experiments._tasks import NextToken
from experiments._trials import Trial, run_all
from headwise.progress import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B6"
TITLE = "Decoders: 4 layers of 16 heads against 12 of 12"
LADDER = Ladder((7.5e-5, 1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3), (6e-4, 1.2e-3))
DEEP, LEAN, WIDE, LONGER = "deep", "lean", "wide lean", "lean, equal FLOPs"
Shapes = dict[str, tuple[int, int, int, int]]  # depth, heads, width, MLP width


class Plan(NamedTuple):
    """What one size trains: the claim's pair, the paper's pair, then controls."""

    pair: Shapes
    paper: Shapes
    controls: Shapes
    length: int  # tokens of a row that are predicted
    batch: int
    valid_rows: int
    trial: Trial
    paper_seeds: tuple[int, ...]


PAIR: Shapes = {DEEP: (12, 12, 384, 1536), LEAN: (4, 16, 384, 1536)}
PAPER: Shapes = {"paper's deep": (12, 12, 768, 3072), "paper's lean": (4, 16, 768, 3072)}
CONTROLS: Shapes = {
    "lean, 12 heads": (4, 12, 384, 1536),
    WIDE: (4, 16, 640, 2560),  # the deep model's parameters
    "narrow deep": (12, 14, 224, 896),  # the lean model's parameters
    "deep, 16 heads": (12, 16, 384, 1536),
}


def _halved(shapes: Shapes) -> Shapes:
    return {
        name: (depth // 2, heads // 2, 2 * (width // 4), mlp // 2)
        for name, (depth, heads, width, mlp) in shapes.items()
    }


PLANS = {
    "tiny": Plan(
        {DEEP: (2, 2, 16, 32), LEAN: (1, 4, 16, 32)}, {}, {"lean, 12 heads": (1, 2, 16, 32)}, 15, 4, 8,
        Trial(4, 2, (0, 1), Ladder((1e-3,), (1e-3,))), (0,),
    ),
    "small": Plan(_halved(PAIR), {}, _halved(CONTROLS), 127, 8, 64, Trial(150, 50, (0, 1, 2), LADDER), (0,)),
    "full": Plan(PAIR, PAPER, CONTROLS, 255, 64, 512, Trial(6_200, 1_000, (0, 1, 2, 3, 4), LADDER), (0, 1, 2)),
}  # fmt: skip


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every model; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    rows = plan.trial.steps * plan.batch
    texts = _data.stories(size, assets, where, rows, 2 * plan.valid_rows, plan.length)
    task = NextToken(texts, plan.length, plan.batch, plan.valid_rows)

    def nets(shapes: Shapes) -> dict[str, Net]:
        return {
            name: even(*shape, length=plan.length, symbols=texts.vocabulary, causal=True)
            for name, shape in shapes.items()
        }

    models, left = run_all(nets(plan.pair), task, plan.trial, parts, track)
    more, rest = run_all(nets(plan.paper), task, plan.trial._replace(seeds=plan.paper_seeds), parts, track, needed=0)
    models, left = models | more, left + rest
    ratio = models[DEEP]["flops"] / models[LEAN]["flops"]
    longer = plan.trial._replace(steps=round(plan.trial.steps * ratio))
    for shapes, trial in ((plan.controls, plan.trial), ({LONGER: plan.pair[LEAN]}, longer)):
        more, rest = run_all(nets(shapes), task, trial, parts, track, needed=0)
        models, left = models | more, left + rest
    return {
        "seeds": list(plan.trial.seeds),
        "tokens": rows * plan.length,
        "length": plan.length,
        "vocabulary": texts.vocabulary,
        "true_loss": texts.true_loss,
        "models": models,
        "left_out": left,
    }


def against(models: Mapping[str, Any], name: str, other: str) -> _points.Mean:
    """How much lower (negative) a model's loss is than another's, over the seeds that both have."""
    pairs = zip(models[name]["loss"], models[other]["loss"], strict=False)
    return _points.mean([a - b for a, b in pairs])


def measured(result: dict[str, Any]) -> str:
    """Losses, the pair at equal tokens and at equal FLOPs, and what the controls say."""
    models = result["models"]
    table = "; ".join(
        f"{name} ({m['depth']} layers, {m['heads']} heads, width {m['width']}, {m['parameters'] / 1e6:.1f}M, "
        f"{m['flops'] / 1e15:.2g} PFLOP): {_points.mean(m['loss']).spelled()}"
        for name, m in models.items()
    )
    pairs = (
        (LEAN, DEEP, "lean against deep at equal tokens"),
        ("paper's lean", "paper's deep", "the paper's pair at equal tokens"),
        (LONGER, DEEP, "lean against deep at equal FLOPs, with more tokens"),
        (LEAN, "narrow deep", "lean against the deep model of its own parameters"),
        (WIDE, DEEP, "a lean model of the deep one's parameters against deep"),
        (LEAN, "lean, 12 heads", "16 heads against 12 in 4 layers"),
        ("deep, 16 heads", DEEP, "16 heads against 12 in 12 layers"),
    )
    told = [f"{words} {against(models, a, b).signed()}" for a, b, words in pairs if {a, b} <= set(models)]
    least = f" The writer's own loss is {result['true_loss']:.3f}." if result.get("true_loss") is not None else ""
    return (
        f"Held-out loss in nats per token, {len(result['seeds'])} seeds, {result['tokens']:,} tokens: {table}.{least} "
        f"Differences of loss, seed by seed: {'; '.join(told)}.{_points.edges(models)}{_points.left_out(result)}"
        f"{_points.whose_times(result)}"
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Held-out loss over parameters and over FLOPs."""
    units = {"parameters": (1e6, "million parameters"), "flops": (1e15, "PFLOP of training")}
    _points.losses(figure, result["models"], DEEP, units)
