"""B6: does a decoder with 4 layers of 16 heads beat one with 12 layers of 12 heads on real text?

Decoders in the manner of GPT-2 (learned positions, GELU, tied embedding; no biases, norms without gains) learn novels
and film reviews. Beside the paper's pair stand the controls it lacks: the lean shape with the deep one's heads (is it
the heads?), a wide lean model with the deep one's parameters, a narrow deep model with the lean one's, and the lean
model trained for as many FLOPs and for as many seconds as the deep one. All have the same optimiser, the same data in
the same order, a rate chosen by the same rule, and several seeds.

Confirmed: the lean model's held-out loss is significantly lower at equal tokens. With conditions: it is not, but it is
at equal FLOPs or at equal time. Refuted: it is lower in none of the three.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points
from experiments._stack import Net, even, step_seconds
from experiments._tasks import Effort, NextToken, best_rate, facts, learn
from headwise.plots import PALETTE
from headwise.probes._watch import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B6"
TITLE = "Decoders: 4 layers of 16 heads against 12 of 12"
SAYS = "A GPT-2 with 4 layers of 16 heads reaches a better validation loss than one with 12 layers of 12 heads."

RATES = (7e-4, 1.5e-3, 3e-3)
DEEP, LEAN = "deep", "lean"


class Plan(NamedTuple):
    """What one size trains: depth, heads, width, MLP width per model."""

    shapes: dict[str, tuple[int, int, int, int]]
    length: int
    batch: int
    effort: Effort
    valid_rows: int
    timing_steps: int


SHAPES = {
    DEEP: (12, 12, 384, 1536),
    LEAN: (4, 16, 384, 1536),
    "narrow deep": (12, 14, 224, 896),  # the lean model's parameters
    "wide lean": (4, 16, 640, 2560),  # the deep model's parameters
    "lean, 12 heads": (4, 12, 384, 1536),
    "deep, 16 heads": (12, 16, 384, 1536),
}
TINY = {DEEP: (3, 2, 16, 32), LEAN: (1, 4, 16, 32), "narrow deep": (3, 2, 8, 16), "lean, 12 heads": (1, 2, 16, 32)}
SMALL = {name: (depth, heads // 2, 2 * (width // 4), mlp // 2) for name, (depth, heads, width, mlp) in SHAPES.items()}
PLANS = {
    "tiny": Plan(TINY, 16, 4, Effort(6, 5, (0, 1), RATES[:2]), 8, 4),
    "small": Plan(SMALL, 128, 8, Effort(150, 50, (0, 1, 2), RATES[1:]), 64, 6),
    "full": Plan(SHAPES, 256, 32, Effort(1200, 400, (0, 1, 2), RATES), 512, 40),
}
LONGER = {"lean, equal FLOPs": "flops", "lean, equal time": "seconds"}


def run(
    size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train every model; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    parts = {} if parts is None else parts
    texts = _data.texts("text", size, assets, where)
    task = NextToken(texts, plan.length, plan.batch, plan.valid_rows)
    nets = {
        name: even(*shape, length=plan.length, symbols=texts.vocabulary, causal=True)
        for name, shape in plan.shapes.items()
    }
    jobs: dict[str, Callable[[], Any]] = {
        name: (lambda net=nets[name]: measure(net, task, plan)) for name in (DEEP, LEAN)
    }
    for name, field in LONGER.items():
        jobs[name] = lambda field=field: longer(nets[LEAN], task, plan, parts, field)
    jobs |= {name: (lambda net=net: measure(net, task, plan)) for name, net in nets.items() if name not in jobs}
    left = _points.work(jobs, parts, track, "decoders")
    return {
        "seeds": list(plan.effort.seeds),
        "tokens": plan.effort.steps * plan.batch * plan.length,
        "models": {name: parts[name] for name in jobs if name in parts},
        "left_out": left,
    }


def measure(net: Net, task: NextToken, plan: Plan) -> dict[str, Any]:
    """Choose the rate of a model, train it with every seed, and time one model alone."""
    chosen = best_rate(net, task, plan.effort)
    trained = learn(net, task, plan.effort, chosen["rate"])
    alone = step_seconds(net, task.loss(net, [0], plan.timing_steps), task.device, plan.timing_steps)
    scores = [score["loss"] for score in task.score(trained)]
    return {
        "loss": scores,
        **chosen,
        **facts(net, trained, plan.effort.steps, task.batch),
        "alone_seconds": alone * plan.effort.steps,
    }


def longer(net: Net, task: NextToken, plan: Plan, parts: MutableMapping[str, Any], field: str) -> dict[str, Any]:
    """The lean model with as many steps as the deep one's FLOPs or seconds pay for; its rate is the lean model's."""
    deep, lean = parts[DEEP], parts[LEAN]
    steps = max(plan.effort.steps, round(plan.effort.steps * deep[field] / lean[field]))
    trained = learn(net, task, plan.effort._replace(steps=steps), lean["rate"])
    scores = [score["loss"] for score in task.score(trained)]
    return {"loss": scores, "rate": lean["rate"], **facts(net, trained, steps, task.batch)}


def against(result: dict[str, Any], name: str, other: str = DEEP) -> _points.Mean | None:
    """How much lower (negative) a model's loss is than another's."""
    models = result["models"]
    return _points.difference(models[name]["loss"], models[other]["loss"]) if {name, other} <= set(models) else None


def measured(result: dict[str, Any]) -> str:
    """Losses, the pair at equal tokens, FLOPs and time, and what the controls say."""
    models = result["models"]
    table = "; ".join(
        f"{name} ({m['depth']} layers, {m['heads']} heads, width {m['width']}, {m['parameters'] / 1e6:.1f}M, "
        f"{m['flops'] / 1e15:.2g} PFLOP, {m['seconds']:.1f} s per model in a stack): "
        f"{_points.mean(m['loss']).spelled()}"
        for name, m in models.items()
    )
    pairs = (
        (LEAN, DEEP, "lean against deep at equal tokens"),
        ("lean, equal FLOPs", DEEP, "at equal FLOPs"),
        ("lean, equal time", DEEP, "at equal time"),
        (LEAN, "narrow deep", "against the deep model of its own parameters"),
        ("wide lean", DEEP, "a lean model of the deep one's parameters against deep"),
        (LEAN, "lean, 12 heads", "16 heads against 12 in 4 layers"),
        ("deep, 16 heads", DEEP, "16 heads against 12 in 12 layers"),
    )
    told = [f"{words} {found.signed()}" for a, b, words in pairs if (found := against(result, a, b)) is not None]
    return (
        f"Held-out loss in nats per token, {len(result['seeds'])} seeds, {result['tokens']:,} tokens: {table}. "
        f"Differences of loss, seed by seed: {'; '.join(told)}.{_points.left_out(result)}"
    )


def verdict(result: dict[str, Any]) -> str:
    """By significance of the lean model's advantage."""
    lower = [(found := against(result, name)) is not None and found.high < 0 for name in (LEAN, *LONGER)]
    if lower[0]:
        return "confirmed"
    return "confirmed with conditions" if any(lower[1:]) else "refuted"


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Held-out loss over parameters, over FLOPs and over seconds of training."""
    panels = figure.subplots(1, 3, sharey=True)
    units = (("parameters", 1e6, "million parameters"), ("flops", 1e15, "PFLOP of training"), ("seconds", 1, "seconds"))
    for axes, (key, unit, label) in zip(panels, units, strict=True):
        for number, (name, model) in enumerate(result["models"].items()):
            _points.bars(axes, [model[key] / unit], [_points.mean(model["loss"])], name, number, line=False)
        axes.axhline(_points.mean(result["models"][DEEP]["loss"]).mean, color=PALETTE[0], linewidth=0.6, linestyle=":")
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xlabel(label)
    panels[0].set_ylabel("held-out loss (nats per token)")
    panels[1].legend(fontsize=6)


if __name__ == "__main__":
    from experiments._lab import main

    main(__spec__.name if __spec__ else __file__)
