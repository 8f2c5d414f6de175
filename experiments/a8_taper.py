"""A8: heads and dimensions that fall with depth, against equal sizes, the theory's and the exact allocation.

Every strategy gets the same budget of attention FLOPs, the same model, text and prices; a taper turned round (later
layers keep more) is the control. Damage is the increase of the loss on held-out text: as cut, after the closed-form
refit, and for one budget after the package's own distillation, which finds its rate by trial. Time is that of reading
prompts, source and cut model in turns. Strategies cannot always spend alike: what each spends stands beside its damage.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import _first_paper
from experiments._models import LABELS, available, settings_for
from headwise import heal, pipeline, strategies
from headwise.budgets import parse, price
from headwise.checks import quality
from headwise.cuts import Moments, reshape
from headwise.devices import timed
from headwise.errors import BudgetError
from headwise.heal.refit import refit
from headwise.progress import Track
from headwise.runs.folder import Settings
from headwise.types import Plan, Readings

CLAIM = "A8"
TITLE = "Fewer and smaller heads in later layers"
STRATEGIES = ("uniform", "taper", "reversed taper", "bound", "exact")
STAGES = ("cut", "refit", "distilled", "fine-tuned")  # the last in results of earlier code only
ALLOW = ("qk", "v", "heads", "kv_heads")
UNSTEADY = 0.1  # of a time's ratio: more than that between turns, and the machine was not quiet


@dataclass(frozen=True)
class Size:
    """How much is done."""

    budgets: tuple[int, ...]  # per cent of attention FLOPs kept
    tokens: tuple[int, int, int]  # calibration, evaluation, measured prices
    length: int
    tuned: tuple[int, ...]  # budgets at which models are distilled too
    teaching: int  # tokens of distillation
    prompts: int  # read at once when timed
    turns: int = 8  # of a timing, the first two to warm up
    strategies: tuple[str, ...] = STRATEGIES


SIZES = {
    "tiny": Size((80,), (128, 128, 0), 32, (), 0, 1, 3, ("uniform", "taper")),
    "small": Size((90, 80, 70), (24_576, 16_384, 1_024), 256, (80,), 65_536, 8),
    "full": Size((95, 90, 85, 80, 75, 70, 65), (262_144, 65_536, 8_192), 512, (80,), 2_000_000, 128),
}


def run(size: str, device: str, assets: Path | None, track: Track, parts: dict[str, Any]) -> dict[str, Any]:
    """Every model at every budget by every strategy; what is in `parts` is not done again."""
    sizes = SIZES[size]
    names = ["embedded"] if size == "tiny" else available(assets, ("embedded", "stories15M"))
    models = {name: _model(name, assets, device, sizes, track, parts) for name in names}
    return {"seeds": [0], "allow": list(ALLOW), "teaching_tokens": sizes.teaching, "models": models}


def _model(
    name: str, assets: Path | None, device: str, sizes: Size, track: Track, done: dict[str, Any]
) -> dict[str, Any]:
    settings = settings_for(name, assets, device, sizes.tokens, sizes.length, allow=ALLOW)
    bench = pipeline.load_source(settings, track)
    settings = replace(settings, budgets=tuple(f"attention={b}%@{bench.calibration.shape[1]}" for b in sizes.budgets))
    readings, moments = pipeline.probe(settings, bench, track)
    jobs = [(budget, strategy) for budget in settings.budgets for strategy in sizes.strategies]
    rows = []
    for budget, strategy in track(jobs, f"{name}: strategies"):
        key, plan = f"{name} {budget} {strategy}", plan_of(strategy, readings, budget, settings)
        if plan is None:
            continue
        if key not in done:
            tuned = any(budget.startswith(f"attention={b}%") for b in sizes.tuned)
            done[key] = _measured(plan, moments, bench, sizes, settings if tuned else None, track)
        rows.append({"budget": budget, "strategy": strategy, **done[key]})
    return {
        "label": LABELS[name],
        "evaluation_tokens": bench.evaluation.numel(),
        "calibration_tokens": bench.calibration.numel(),
        "length": bench.calibration.shape[1],
        "rows": rows,
    }


def plan_of(strategy: str, readings: Readings, budget: str, settings: Settings) -> Plan | None:
    """The strategy's plan; None where it cannot meet the budget."""
    source = readings.source
    budgets = (parse(budget, source),)
    try:
        if strategy == "bound":
            return _first_paper.bound(source, readings, budgets, settings.allow)
        if strategy.endswith("taper"):
            return _first_paper.taper(source, readings, budgets, settings.allow, strategy.startswith("reversed"))
        return strategies.allocate(readings, budgets, strategy, settings.allow)
    except BudgetError:
        return None


def _measured(
    plan: Plan, moments: list[Moments], bench: pipeline.Source, sizes: Size, tuned: Settings | None, track: Track
) -> dict[str, Any]:
    """Damage at every stage, with its 95% interval, and time against the source."""
    cut = reshape(bench.family, bench.model, plan, moments)
    healed, _ = refit(bench.family, bench.model, cut, bench.calibration[: max(1, 131_072 // sizes.length)])
    stages = {"cut": _damage(bench, cut), "refit": _damage(bench, healed)}
    if tuned is not None:
        wanted = replace(tuned, heal="distill", heal_options=(f"tokens={sizes.teaching}",))
        taught, _ = heal.healed("distill", bench.job(wanted, cut, track, None))
        stages["distilled"] = _damage(bench, taught)
    return {
        "damage": stages,
        "predicted": plan.predicted_damage,
        "spent": plan.spent["attention"] / price(plan.budgets[0], plan.source),
        "sizes": [[s.query_heads, s.kv_heads, s.qk_width, s.qk_dim, s.v_dim] for s in plan.target.layers],
        "time": prompt_time(bench.model, healed, bench.evaluation, sizes.prompts, sizes.turns),
    }


def _damage(bench: pipeline.Source, model: nn.Module) -> dict[str, float]:
    found = quality.compare(bench.family, bench.model, model, bench.evaluation)
    return {**found.damage(), "kl": float(found.kl.mean())}


@torch.no_grad()
def prompt_time(source: nn.Module, cut: nn.Module, tokens: torch.Tensor, prompts: int, count: int) -> dict[str, Any]:
    """Seconds to read the same prompts, source and cut in turns; in bfloat16 on CUDA. Ratios with their spread."""
    device = source.device
    ids = tokens[torch.arange(prompts) % len(tokens)].to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        turns = [
            [timed(lambda model=model: model.model(ids, use_cache=False), device)[1] for model in (source, cut)]
            for _ in range(count)
        ][2:]  # the first turns warm up
    ratios = [after / before for before, after in turns]
    return {
        "ratio": statistics.median(ratios),
        "ratio_spread": max(ratios) - min(ratios),
        "source_seconds": statistics.median(before for before, _ in turns),
        "cut_seconds": statistics.median(after for _, after in turns),
        "prompt_tokens": int(ids.numel()),
    }


def _rows(result: dict[str, Any]) -> list[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Model, budget, and the rows of that budget by strategy."""
    out = []
    for name, model in result["models"].items():
        for budget in dict.fromkeys(row["budget"] for row in model["rows"]):
            out.append((name, budget, {r["strategy"]: r for r in model["rows"] if r["budget"] == budget}))
    return out


def _at(row: dict[str, Any], stage: str) -> float:
    return float(row["damage"][stage]["measured"])


def measured(result: dict[str, Any]) -> str:
    """Perplexity lost by every strategy at every budget, after healing, and the time it saves."""
    lines = []
    for name, budget, rows in _rows(result):
        kept = budget.removeprefix("attention=").partition("@")[0]
        parts = []
        for strategy, row in rows.items():
            ends = row["damage"]["refit"]
            half = (ends["measured_high"] - ends["measured_low"]) / 2
            steps = [f"{math.expm1(_at(row, 'cut')) * 100:+.1f}% as cut"]
            steps.append(f"{math.expm1(_at(row, 'refit')) * 100:+.2f}% ± {half * 100:.2f} refitted")
            for stage in (each for each in STAGES[2:] if each in row["damage"]):
                harm = " (training did harm)" if _at(row, stage) > _at(row, "refit") else ""
                steps.append(f"{math.expm1(_at(row, stage)) * 100:+.2f}% {stage}{harm}")
            clock = row["time"]
            parts.append(
                f"{strategy} (spends {row['spent']:.1%}) {', '.join(steps)}, time {clock['ratio']:.2f} ± "
                f"{clock['ratio_spread'] / 2:.2f}"
            )
        lines.append(f"{LABELS[name]}, {kept} of attention FLOPs: {'; '.join(parts)}.")
    clocks = [row["time"] for _, _, rows in _rows(result) for row in rows.values()]
    unsteady = sum(clock["ratio_spread"] > UNSTEADY * clock["ratio"] for clock in clocks)
    lines.append(
        "Times are those of the cut model's turns over the source's, ± half the range of six pairs of turns; "
        f"{unsteady} of {len(clocks)} vary by more than {UNSTEADY:.0%} between turns, too much to tell fast from slow."
    )
    return "\n".join(f"- {line}" for line in lines)


def draw(result: dict[str, Any], figure: Any) -> None:
    """Damage after healing by budget, one panel per model."""
    from headwise.report.plots import PALETTE

    models = result["models"]
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for axis, (name, model) in zip(axes, models.items(), strict=True):
        for colour, strategy in zip(PALETTE, STRATEGIES, strict=False):
            rows = [row for row in model["rows"] if row["strategy"] == strategy]
            x = [float(row["budget"].split("=")[1].partition("%")[0]) for row in rows]
            ends = [row["damage"]["refit"] for row in rows]
            y = [end["measured"] for end in ends]
            below = [end["measured"] - end["measured_low"] for end in ends]
            above = [end["measured_high"] - end["measured"] for end in ends]
            axis.errorbar(x, y, yerr=[below, above], color=colour, marker="o", capsize=3, label=strategy)
        axis.set_title(LABELS[name])
        axis.set_xlabel("attention FLOPs kept, %")
        axis.set_ylabel("damage after refit, nats per token")
        axis.legend(fontsize=7)
