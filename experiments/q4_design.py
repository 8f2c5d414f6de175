"""Open question: does a design of `headwise design` reach a uniform 12-layer model's loss with 30% fewer parameters?

Designs of every strategy for 70% and, where the second paper's rule is concerned, 50% of the baseline's parameters
learn the embedded model's corpus (Python source) beside the baseline: Llama's block, the same data in the same order, a
rate each by the same rule (`_rates`, on rows of its own), several seeds, more of them at the best rate. What layers
that differ cost in speed is measured on models of stock size that the runtime builds from the designs' configurations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments import _data, _points, _rates
from experiments._stack import Layer, Net
from experiments._tasks import NextToken, facts, learn_at, times
from headwise import budgets, cost
from headwise.devices import timed
from headwise.progress import Track
from headwise.research.designs import configs, proposals, shapes
from headwise.types import ModelShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIM = "Designs"
TITLE = "Designs against a uniform model of 12 layers"

BASE = "baseline"
MARGIN = 0.01  # nats per token
PACE = 0.9
LADDER = _rates.Ladder((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), (1e-3, 2e-3))


class Wanted(NamedTuple):
    """A design to try."""

    strategy: str
    share: int  # percent of the baseline's parameters
    depth: int | None


class Plan(NamedTuple):
    """What one size designs and trains."""

    base: shapes.Sketch
    designs: dict[str, Wanted]
    length: int
    batch: int
    steps: int
    seeds: tuple[int, ...]
    more: tuple[int, ...]  # seeds that are trained at the best rate only
    ladder: _rates.Ladder
    valid_rows: int
    timing_steps: int
    large: str  # budget of the models whose speed is compared
    vocabulary: int
    rows: tuple[int, int]  # of their batch: rows and tokens of a row
    repeats: int


def _designs(depth: int) -> dict[str, Wanted]:
    """In order of interest: each is finished before the next is begun."""
    return {
        f"leaner, {depth // 3} layers": Wanted("leaner", 70, depth // 3),
        f"leaner, {depth // 4} layers": Wanted("leaner", 70, depth // 4),
        f"uniform, {depth} layers": Wanted("uniform", 70, depth),
        f"leaner, {depth // 6} layers": Wanted("leaner", 70, depth // 6),
        f"taper, {depth} layers": Wanted("taper", 70, depth),
        f"leaner, {depth // 2} layers": Wanted("leaner", 70, depth // 2),
        f"leaner, {depth // 2} layers, half": Wanted("leaner", 50, depth // 2),
        f"bound, {depth} layers": Wanted("bound", 70, depth),
    }


BASELINE = shapes.Sketch(256, 12, 4, 64, 704)
PLANS = {
    "tiny": Plan(
        shapes.Sketch(128, 3, 2, 64, 352),
        {name: _designs(3)[name] for name in ("leaner, 1 layers", "taper, 3 layers")},
        16, 4, 5, (0, 1), (2,), _rates.Ladder((1e-3,), (1e-3,)), 8, 4, "params=1M", 64, (2, 16), 2,
    ),
    "small": Plan(
        BASELINE._replace(width=128, heads=2, mlp=352),
        _designs(12), 128, 8, 150, (0, 1), (2, 3), LADDER, 64, 6, "params=10M", 4096, (2, 64), 3,
    ),
    "full": Plan(
        BASELINE,
        _designs(12), 256, 32, 900, (0, 1), (2, 3, 4), LADDER, 512, 25, "params=300M", 32_000, (8, 1024), 12,
    ),
}  # fmt: skip


def run(size: str, device: str, assets: Path | None, track: Track, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Design, train and time; what `parts` holds is done already."""
    plan, where = PLANS[size], torch.device(device)
    texts = _data.texts("code", size, assets, where)
    task = NextToken(texts, plan.length, plan.batch, plan.valid_rows)
    maker = configs.Maker("llama", vocab=texts.vocabulary, length=plan.length)
    base = maker.make(plan.base)
    made = {BASE: base} | {name: designed(maker, base, wanted) for name, wanted in plan.designs.items()}
    nets = {name: net_of(shape, plan.length) for name, shape in made.items()}
    timing = f"times of {len(nets)}"
    jobs: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed(plan, where),
        timing: lambda: times(nets, task, plan.timing_steps),
    }
    left = _points.work(jobs, parts, track, "times")
    for name, net in nets.items():
        trying = partial(attempt, net, task, plan, plan.seeds)
        left += _rates.search({name: trying}, plan.ladder, parts, track, name)
        if (key := further(name, plan, parts)) is not None:
            left += _points.work({key: partial(more_seeds, name, net, task, plan, parts)}, parts, track, name)
    models = {name: model for name in nets if (model := gathered(name, plan, parts)) is not None}
    _points.need([name for name in list(nets)[:2] if name not in models])
    for name, model in models.items():
        model |= described(made[name])
    _points.timed(parts, timing, models, plan.steps)
    return {
        "seeds": list(plan.seeds + plan.more),
        "tokens": plan.steps * plan.batch * plan.length,
        "models": models,
        "speed": parts.get("speed"),
        "left_out": left,
    }


def designed(maker: configs.Maker, base: ModelShape, wanted: Wanted) -> ModelShape:
    """A strategy's shape for a share of the baseline's parameters."""
    limits = (budgets.parse(f"params={wanted.share}%", base),)
    return shapes.design(wanted.strategy, maker.make, limits, maker.rules(False, depth=wanted.depth))


def net_of(shape: ModelShape, length: int) -> Net:
    """The shape as a stack trains it: Llama's block, scaled and turned as the runtime does."""
    layers = [Layer(x.query_heads, x.qk_dim, x.mlp_width, x.kv_heads, x.v_dim) for x in shape.layers]
    head_dim = max(layer.qk_width for layer in shape.layers)
    return Net(shape.hidden_size, tuple(layers), length, shape.vocab_size, causal=True, rotary=True, head_dim=head_dim)


def attempt(
    net: Net, task: NextToken, plan: Plan, seeds: Sequence[int], rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Some seeds of one design at some rates: compared on held-out rows, reported on others."""
    return [
        {
            "tried": _points.mean(_points.column(task.score(trained), "loss")).mean,
            "loss": _points.column(task.score(trained, "test"), "loss"),
            **facts(net, trained, plan.steps, task.batch),
        }
        for trained in learn_at(net, task, seeds, plan.steps, rates)
    ]


def further(name: str, plan: Plan, parts: MutableMapping[str, Any]) -> str | None:
    """The part that has more seeds of a design at its best rate."""
    found = _rates.best(name, plan.ladder, parts)
    return None if found is None or not plan.more else f"{_rates.key(name, found['rate'])}, seeds {plan.more}"


def more_seeds(name: str, net: Net, task: NextToken, plan: Plan, parts: MutableMapping[str, Any]) -> dict[str, Any]:
    """Train them."""
    rate = _rates.best(name, plan.ladder, parts)["rate"]
    return attempt(net, task, plan, plan.more, [rate])[0]


def gathered(name: str, plan: Plan, parts: MutableMapping[str, Any]) -> dict[str, Any] | None:
    """A design at its best rate, with all the seeds that were trained there."""
    found = _rates.best(name, plan.ladder, parts)
    if found is not None and (key := further(name, plan, parts)) in parts:
        found["loss"] = found["loss"] + parts[str(key)]["loss"]
    return found


def described(shape: ModelShape) -> dict[str, Any]:
    """What a design consists of."""
    return {
        "parameters": cost.parameters(shape),
        "layers": [[x.query_heads, x.qk_dim, x.v_dim, x.mlp_width] for x in shape.layers],
        "conditioning": shapes.log_conditioning(shape),
    }


def speed(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Training steps of a uniform and of a tapered model from their configurations, in turns: FLOPs per second."""
    rows, length = plan.rows
    made = proposals.design("llama", plan.large, ("uniform", "taper"), vocab=plan.vocabulary, length=length)
    found: dict[str, Any] = {
        each.strategy: {
            "parameters": cost.parameters(each.shape),
            "kinds_of_layers": len(set(each.shape.layers)),
            "flops": rows * length * proposals.train_flops(each.shape, length),
        }
        for each in made
    }
    steps = {each.strategy: proposals.steps_of(each, rows, length, device)[0] for each in made}
    turns = [{name: timed(step, device)[1] for name, step in steps.items()} for _ in range(plan.repeats + 2)]
    for name, known in found.items():
        known["seconds"] = statistics.median(turn[name] for turn in turns[2:])
        known["flops_per_second"] = known["flops"] / known["seconds"]
    scale = found["taper"]["flops"] / found["uniform"]["flops"]
    found["ratios"] = [scale * turn["uniform"] / turn["taper"] for turn in turns[2:]]
    return found


def against(result: dict[str, Any]) -> dict[str, _points.Mean]:
    """Every design's loss above the baseline's."""
    models = result["models"]
    rest = {name: model for name, model in models.items() if name != BASE}
    return {name: paired(model, models[BASE]) for name, model in rest.items()}


def paired(model: dict[str, Any], other: dict[str, Any]) -> _points.Mean:
    """Loss above another's, over the seeds that both have."""
    pairs = zip(model["loss"], other["loss"], strict=False)
    return _points.mean([a - b for a, b in pairs])


def reached(result: dict[str, Any]) -> list[str]:
    """Designs with at least 30% fewer parameters whose mean loss is within the margin, fewest parameters first."""
    models = result["models"]
    able = [
        name
        for name, found in against(result).items()
        if models[name]["parameters"] <= 0.7 * models[BASE]["parameters"] and found.mean <= MARGIN
    ]
    return sorted(able, key=lambda name: models[name]["parameters"])


def measured(result: dict[str, Any]) -> str:
    """The baseline, every design against it, and what differing layers cost in speed."""
    models, base = result["models"], result["models"][BASE]
    table = "; ".join(
        f"{name} ({models[name]['parameters'] / base['parameters']:.0%} of the parameters, {models[name]['depth']} "
        f"layers, width {models[name]['width']}{_points.faster(models[name], base)}) "
        f"{found.signed()} over {min(len(models[name]['loss']), len(base['loss']))} seeds"
        for name, found in against(result).items()
    )
    best = reached(result)
    ends = f"Within {MARGIN} nats with 30% fewer parameters: {', '.join(best)}." if best else "None reaches it."
    pace = result["speed"]
    told = ""
    if pace is not None:
        ratio = _points.mean(pace["ratios"])
        told = (
            f" Training a model of {pace['taper']['parameters'] / 1e6:.0f}M parameters with "
            f"{pace['taper']['kinds_of_layers']} kinds of layers runs at {ratio.spelled(2)} of the uniform model's "
            f"FLOPs per second ({pace['uniform']['flops_per_second'] / 1e12:.3g} TFLOP/s)."
        )
    return (
        f"Held-out loss, {result['tokens']:,} tokens: baseline ({base['depth']} layers, "
        f"width {base['width']}, {base['parameters'] / 1e6:.1f}M) {_points.mean(base['loss']).spelled()}. Designs, "
        f"loss above it: {table}. {ends}{told}{_points.edges(models)}{_points.left_out(result)}"
        f"{_points.whose_times(result)}"
    )


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Loss over parameters, over FLOPs and over seconds of training."""
    units = {"parameters": (1e6, "million parameters"), "flops": (1e15, "PFLOP of training"), "seconds": (1, "seconds")}
    _points.losses(figure, result["models"], BASE, units)
