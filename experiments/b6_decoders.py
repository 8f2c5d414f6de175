"""B6: does a decoder with 4 layers of 16 heads beat one with 12 layers of 12 heads on real text?

Decoders in the manner of GPT-2 (learned positions, GELU, tied embedding; no biases, norms without gains) learn novels
and film reviews. Beside the paper's pair stand controls: the lean shape with the deep one's heads (is it
the heads?), a wide lean model with the deep one's parameters, a narrow deep model with the lean one's, and the lean
model trained for as many FLOPs and for as many seconds as the deep one. All have the same optimiser, the same data in
the same order, a rate chosen by the same rule (`_rates`: the mean over seeds, on the rows that are reported), and
several seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points, _rates
from experiments._stack import Net, even
from experiments._tasks import NextToken, facts, learn_at, times
from headwise.progress import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "B6"
TITLE = "Decoders: 4 layers of 16 heads against 12 of 12"

LADDER = _rates.Ladder((1.5e-4, 3e-4, 7e-4, 1.5e-3, 3e-3), (7e-4, 1.5e-3))
DEEP, LEAN, WIDE = "deep", "lean", "wide lean"
TIMES = 3  # as many tokens, for a longer comparison of the pair of equal parameters


class Plan(NamedTuple):
    """What one size trains: depth, heads, width, MLP width per model."""

    shapes: dict[str, tuple[int, int, int, int]]
    length: int
    batch: int
    steps: int
    seeds: tuple[int, ...]
    valid_rows: int
    timing_steps: int
    ladder: _rates.Ladder = LADDER


SHAPES = {
    DEEP: (12, 12, 384, 1536),
    LEAN: (4, 16, 384, 1536),
    WIDE: (4, 16, 640, 2560),  # the deep model's parameters
    "narrow deep": (12, 14, 224, 896),  # the lean model's parameters
    "lean, 12 heads": (4, 12, 384, 1536),
    "deep, 16 heads": (12, 16, 384, 1536),
}
TINY = {
    DEEP: (3, 2, 16, 32),
    LEAN: (1, 4, 16, 32),
    WIDE: (1, 4, 24, 48),
    "narrow deep": (3, 2, 8, 16),
    "lean, 12 heads": (1, 2, 16, 32),
}
SMALL = {name: (depth, heads // 2, 2 * (width // 4), mlp // 2) for name, (depth, heads, width, mlp) in SHAPES.items()}
PLANS = {
    "tiny": Plan(TINY, 16, 4, 6, (0, 1), 8, 4, _rates.Ladder((3e-4, 7e-4), (3e-4, 7e-4))),
    "small": Plan(SMALL, 128, 8, 150, (0, 1, 2), 64, 6),
    "full": Plan(SHAPES, 256, 32, 1200, (0, 1, 2), 512, 40),
}
LONGER = {"lean, equal FLOPs": "flops", "lean, equal time": "seconds"}


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train every model; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    texts = _data.texts("text", size, assets, where)
    task = NextToken(texts, plan.length, plan.batch, plan.valid_rows)
    nets = {
        name: even(*shape, length=plan.length, symbols=texts.vocabulary, causal=True)
        for name, shape in plan.shapes.items()
    }
    timing = f"times of {len(nets)}"
    left = _points.work({timing: lambda: times(nets, task, plan.timing_steps)}, parts, track, "times")
    attempts = {name: partial(attempt, net, task, plan, plan.steps) for name, net in nets.items()}
    first = {name: attempts.pop(name) for name in (DEEP, LEAN)}
    left += _rates.search(first, plan.ladder, parts, track, "deep and lean")
    models = gathered(first, plan, parts, timing)
    _points.need([name for name in first if name not in models])
    longer = {
        name: (LEAN, round(plan.steps * models[DEEP][field] / models[LEAN][field])) for name, field in LONGER.items()
    }
    left += train_longer(longer, models, nets, task, plan, parts, track)
    left += _rates.search(attempts, plan.ladder, parts, track, "controls")
    models |= gathered(attempts, plan, parts, timing)
    patient = {f"{name}, {TIMES} times the tokens": (name, TIMES * plan.steps) for name in (DEEP, WIDE)}
    left += train_longer(patient, models, nets, task, plan, parts, track)
    return {
        "seeds": list(plan.seeds),
        "tokens": plan.steps * plan.batch * plan.length,
        "models": models,
        "timed_alone": timing in parts,
        "left_out": left,
    }


def train_longer(
    wanted: dict[str, tuple[str, int]],
    models: dict[str, dict[str, Any]],
    nets: dict[str, Net],
    task: NextToken,
    plan: Plan,
    parts: MutableMapping[str, Any],
    track: Track,
) -> list[str]:
    """Train models of `models` for other numbers of steps, at the rates they have, and add what was found there."""
    able = {name: pair for name, pair in wanted.items() if pair[0] in models}
    keys = {name: f"{of}, {steps} steps, rate {models[of]['rate']:g}" for name, (of, steps) in able.items()}
    jobs = {
        keys[name]: lambda of=of, steps=steps: attempt(nets[of], task, plan, steps, [models[of]["rate"]])[0]
        for name, (of, steps) in able.items()
    }
    left = _points.work(jobs, parts, track, "longer")
    for name, (of, steps) in able.items():
        if keys[name] in parts:
            found = {field: value for field, value in parts[keys[name]].items() if field != "tried"}
            models[name] = {**found, "rate": models[of]["rate"], "settled": True}
            if "seconds" in models[of]:
                models[name]["seconds"] = models[of]["seconds"] * steps / plan.steps
    return left


def attempt(net: Net, task: NextToken, plan: Plan, steps: int, rates: Sequence[float]) -> list[dict[str, Any]]:
    """All seeds of one model at some rates."""
    found = []
    for trained in learn_at(net, task, plan.seeds, steps, rates):
        losses = _points.column(task.score(trained), "loss")
        found.append({"tried": _points.mean(losses).mean, "loss": losses, **facts(net, trained, steps, task.batch)})
    return found


def gathered(
    names: Iterable[str], plan: Plan, parts: MutableMapping[str, Any], timing: str
) -> dict[str, dict[str, Any]]:
    """Models at their best rate, with their time alone where that was measured."""
    models = {name: model for name in names if (model := _rates.best(name, plan.ladder, parts)) is not None}
    for name, model in models.items():
        tried = {rate: parts[_rates.key(name, float(rate))] for rate in model["rates"]}
        model["losses"] = {rate: part["loss"] for rate, part in tried.items() if "loss" in part}
    _points.timed(parts, timing, models, plan.steps)
    return models


def against(result: dict[str, Any], name: str, other: str = DEEP) -> _points.Mean | None:
    """How much lower (negative) a model's loss is than another's."""
    models = result["models"]
    return _points.difference(models[name]["loss"], models[other]["loss"]) if {name, other} <= set(models) else None


def clear(result: dict[str, Any], name: str, other: str = DEEP) -> bool:
    """Whether a difference stands, whatever rates are still to be tried: those of the worse model are settled."""
    found = against(result, name, other)
    if found is None or found.low <= 0 <= found.high:
        return False
    return bool(result["models"][other if found.high < 0 else name].get("settled", True))


def in_words(result: dict[str, Any], name: str, other: str = DEEP, unit: str = "") -> str:
    """The difference in words; while rates are not settled and might turn it, also at a rate that both had."""
    pair = [result["models"][each] for each in (name, other)]
    found, text = _points.difference(*(model["loss"] for model in pair)), ""
    ends = [
        f"{each} at {m['rate']:g}" for each, m in zip((name, other), pair, strict=True) if not m.get("settled", True)
    ]
    if ends and not clear(result, name, other) and (rates := common(*pair)):
        rate = min(rates, key=lambda each: sum(_points.mean(model["losses"][each]).mean for model in pair))
        same = _points.difference(*(model["losses"][rate] for model in pair))
        if {float(rate)} != {float(model["rate"]) for model in pair}:
            text = f"{same.signed()}{unit} with both at rate {float(rate):g}, at the best rates so far "
    return f"{text}{found.signed()}{unit}" + (f" (rates not settled: {', '.join(ends)})" if ends else "")


def common(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Rates that both models were trained at."""
    return [rate for rate in one.get("losses", {}) if rate in other.get("losses", {})]


def measured(result: dict[str, Any]) -> str:
    """Losses, the pair at equal tokens, FLOPs and time, and what the controls say."""
    models = result["models"]
    alone = "alone" if result.get("timed_alone") else "per model in a stack"
    spent = {name: f", {m['seconds']:.1f} s {alone}" if "seconds" in m else "" for name, m in models.items()}
    table = "; ".join(
        f"{name} ({m['depth']} layers, {m['heads']} heads, width {m['width']}, {m['parameters'] / 1e6:.1f}M, "
        f"{m['flops'] / 1e15:.2g} PFLOP{spent[name]}): "
        f"{_points.mean(m['loss']).spelled()}"
        for name, m in models.items()
    )
    long = f", {TIMES} times the tokens"
    pairs = (
        (LEAN, DEEP, "lean against deep at equal tokens"),
        ("lean, equal FLOPs", DEEP, "at equal FLOPs"),
        ("lean, equal time", DEEP, "at equal time"),
        (LEAN, "narrow deep", "against the deep model of its own parameters"),
        (WIDE, DEEP, "a lean model of the deep one's parameters and FLOPs against deep"),
        (WIDE + long, DEEP + long, f"the same with {TIMES} times the tokens"),
        (LEAN, "lean, 12 heads", "16 heads against 12 in 4 layers"),
        ("deep, 16 heads", DEEP, "16 heads against 12 in 12 layers"),
    )
    found = [f"{words} {in_words(result, a, b)}" for a, b, words in pairs if {a, b} <= set(models)]
    return (
        f"Held-out loss in nats per token, {len(result['seeds'])} seeds, {result['tokens']:,} tokens: {table}. "
        f"Differences of loss, seed by seed: {'; '.join(found)}. Rates were chosen on the same held-out rows."
        f"{_points.edges(models)}{_points.left_out(result)}{_points.whose_times(result)}"
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Held-out loss over parameters, over FLOPs and over seconds of training."""
    units = {"parameters": (1e6, "million parameters"), "flops": (1e15, "PFLOP of training"), "seconds": (1, "seconds")}
    _points.losses(figure, result["models"], DEEP, units)
