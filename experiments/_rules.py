"""docs/DESIGN_RULES.md: what the results say that a designer of models should do. Written by code, number by number.

Every question is answered from the committed results of one or two experiments; where these are missing, the page
says what to run.
`headwise reproduce --render` writes the page beside the evidence, `--check` compares it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments import b2_conditioning, b3_grid, b5_encoders, b6_decoders, b7_listops, b8_design
from experiments._data import VOCABULARY
from experiments._points import Mean, difference, edges, faster, mean, said

Results = Mapping[str, dict[str, Any]]  # what experiments found, by name
INTRO = (
    "What the experiments in [EVIDENCE.md](EVIDENCE.md) say to someone who designs a model, with 95% intervals over "
    "seeds. This page is written by `headwise reproduce --render` from `experiments/results/`. Models were small and "
    "trained for seconds each, so that differences of shape may shrink with longer training: try your own shapes with "
    "`headwise search` before a long run. `headwise design` proposes shapes by these rules."
)


class Rule(NamedTuple):
    """A question, the experiments that answer it, and the answer."""

    question: str
    names: tuple[str, ...]
    answer: Callable[..., str]


def page(found: Results) -> str:
    """The whole page."""
    lines = ["# Design rules", "", INTRO]
    for rule in RULES:
        missing = [name for name in rule.names if name not in found]
        lines += ["", f"## {rule.question}", ""]
        if missing:
            commands = " and ".join(f"`headwise reproduce {name}`" for name in missing)
            lines.append(f"Not measured yet: run {commands}.")
        else:
            sources = ", ".join(name.partition("_")[0].upper() for name in rule.names)
            lines.append(f"{rule.answer(*(found[name] for name in rule.names))} ({sources})")
    return "\n".join(lines) + "\n"


def word(found: Mean, better: str, worse: str, level: str = "no clear difference") -> str:
    """Which of two words an interval allows; lower is better."""
    return better if found.high < 0 else worse if found.low > 0 else level


def depth_or_width(decoders: dict[str, Any]) -> str:
    """Equal parameters, other depth."""
    models, parts, won = decoders["models"], [], 0
    long = f", {b6_decoders.TIMES} times the tokens"
    for lean, deep in (("wide lean", "deep"), ("lean", "narrow deep"), ("wide lean" + long, "deep" + long)):
        if (found := b6_decoders.against(decoders, lean, deep)) is None:
            continue
        a, b = models[lean], models[deep]
        open_ = not all(model.get("settled", True) for model in (a, b))
        sure = b6_decoders.clear(decoders, lean, deep) or not open_
        parts.append(
            f"{a['depth']} layers of width {a['width']} against {b['depth']} of width {b['width']}"
            f"{long if lean.endswith(long) else ''} "
            f"({a['parameters'] / b['parameters']:.0%} of the parameters{faster(a, b)}): "
            f"{b6_decoders.in_words(decoders, lean, deep, ' nats')}, "
            + (word(found, "fewer and wider is better", "more and narrower is better") if sure else "not clear yet")
        )
        won += sure * ((found.high < 0) - (found.low > 0))
    rule = " Spend on width before depth." if won > 0 else " Spend on depth before width." if won < 0 else ""
    return f"At about equal parameters: {'; '.join(parts)}.{rule}{edges(models)}"


def fewer_layers(decoders: dict[str, Any], grid: dict[str, Any]) -> str:
    """Layers removed with nothing in exchange."""
    tokens = b6_decoders.in_words(decoders, "lean", unit=" nats")
    deep, lean = (decoders["models"][name]["depth"] for name in ("deep", "lean"))
    words = [f"{deep} layers to {lean} at the same width changes the loss by {tokens} at equal tokens"]
    for name, label in (("lean, equal FLOPs", "equal FLOPs"), ("lean, equal time", "equal time")):
        if name in decoders["models"]:
            words.append(f"{b6_decoders.in_words(decoders, name)} at {label} (more tokens are seen)")
    steps = b3_grid.gains(grid, "depth")
    ends = f" On images a step to more layers gains {mean(steps).signed(4)} of accuracy." if steps else ""
    return f"For a decoder, {'; '.join(words)}.{ends}"


def more_heads(conditioning: dict[str, Any], grid: dict[str, Any], decoders: dict[str, Any]) -> str:
    """Heads at a fixed width, which cost no parameters."""
    rows = conditioning["split"]
    first, last = rows[0], rows[-1]
    steps = b3_grid.gains(grid, "heads")
    text = ""
    if {"lean", "lean, 12 heads"} <= set(decoders["models"]):
        found = b6_decoders.in_words(decoders, "lean", "lean, 12 heads", " nats")
        many, few = (decoders["models"][name]["heads"] for name in ("lean", "lean, 12 heads"))
        text = f"On text {many} heads instead of {few} change the loss by {found}. "
    timed = [cell for cell in grid["cells"].values() if "seconds" in cell]
    cells = {(c["depth"], c["heads"]): c for c in timed if c["mlp"] == max_mlp(grid)}
    slower = [
        cells[depth, max(h for d, h in cells if d == depth)]["seconds"]
        / cells[depth, min(h for d, h in cells if d == depth)]["seconds"]
        for depth in {d for d, _ in cells}
    ]
    times = f"{min(slower):.2f} to {max(slower):.2f} times as long as the fewest" if slower else ""
    return (
        f"On images, {first['heads']} to {last['heads']} heads at one width take accuracy from "
        f"{mean(first['accuracy']).mean:.1%} to {mean(last['accuracy']).mean:.1%} "
        f"({difference(last['accuracy'], first['accuracy']).signed(3)}); in the grid a step to more heads gains "
        f"{mean(steps).signed(4) if steps else 'what was not measured'}. {text}Parameters stay"
        + (f", time does not: the most heads train {times}." if times else ".")
    )


def max_mlp(grid: dict[str, Any]) -> int:
    """The MLP width that most cells have."""
    return int(statistics.mode(cell["mlp"] for cell in grid["cells"].values()))


def conditioning_rule(found: dict[str, Any]) -> str:
    """What the number is worth."""
    rows = found["split"]
    start, after = (
        [mean(b2_conditioning.number(row, when)).mean for row in (rows[0], rows[-1])] for when in ("start", "after")
    )
    within = b2_conditioning.within(found, "after", "accuracy")
    if within is None or within["p"] >= 0.05:
        ends = f"but a {said(within)} among models of equal heads: it compares shapes, not trained models"
    else:
        ends = f"and a {said(within)} among models of equal heads"
    return (
        f"From {rows[0]['heads']} to {rows[-1]['heads']} heads at one width the condition number of their outputs goes "
        f"from {start[0]:.2g} to {start[1]:.2g} before training and from {after[0]:.2g} to {after[1]:.2g} after."
        f"{_at_one_dimension(found['grown'])} With test accuracy it has a "
        f"{said(b2_conditioning.link(found, 'after', 'accuracy'))} over all models, {ends}."
    )


def _at_one_dimension(rows: list[dict[str, Any]]) -> str:
    """Heads added without making them smaller: whether a better number brings accuracy."""
    if len(rows) < 2:
        return ""
    first, last = rows[0], rows[-1]
    numbers = [mean(b2_conditioning.number(row, "after")).mean for row in (first, last)]
    gain = difference(last["accuracy"], first["accuracy"])
    ends = word(gain, "a better number is no aim in itself", "accuracy follows", "accuracy does not clearly follow")
    return (
        f" From {first['heads']} to {last['heads']} heads of one dimension it goes from {numbers[0]:.2g} to "
        f"{numbers[1]:.2g} after training, and accuracy changes by {gain.signed(3)}: {ends}."
    )


def tapering(designs: dict[str, Any]) -> str:
    """Layers that differ, from scratch."""
    models = designs["models"]
    names = [name for name in models if name.startswith(("taper", "bound"))]
    flat = next((name for name in models if name.startswith("uniform")), None)
    parts = []
    for name in names:
        if flat is not None:
            found = b8_design.paired(models[name], models[flat])
            answer = word(found, "better", "worse")
            parts.append(f"{name} {found.signed()} nats against uniform of the same parameters ({answer})")
    pace = designs["speed"]
    speed = f" Layers that differ train at {mean(pace['ratios']).spelled(2)} of the speed per FLOP." if pace else ""
    return f"From scratch: {'; '.join(parts) or 'no pair was trained'}.{speed}"


def budget_rule(designs: dict[str, Any]) -> str:
    """What designs for fewer parameters reach, and which of those that reach the baseline's loss is cheapest."""
    models, base = designs["models"], designs["models"][b8_design.BASE]
    gaps = b8_design.against(designs)
    able = b8_design.reached(designs) or [min(gaps, key=lambda name: gaps[name].mean)]
    best = min(able, key=lambda name: models[name]["flops"])
    table = "; ".join(
        f"{name} {gap.signed()} nats at {models[name]['parameters'] / base['parameters']:.0%} of the parameters and "
        f"{models[name]['flops'] / base['flops']:.0%} of the FLOPs{faster(models[name], base)}"
        for name, gap in gaps.items()
    )
    return (
        f"Designs with at most 70% of the parameters of a uniform model of {base['depth']} layers, against it: "
        f"{table}. Verdict: {b8_design.verdict(designs)}. Start from `headwise design --strategy "
        f"{best.partition(',')[0]}` ({best}), the cheapest to train of those that come as near as any."
    )


def long_lists(found: dict[str, Any]) -> str:
    """Nystrom attention on ListOps."""
    models = found["models"]
    best = max(models.values(), key=lambda model: mean(model["accuracy"]).mean)
    return (
        f"Best of {len(models)}: {best['depth']} layer{'s' * (best['depth'] > 1)} of {best['heads']} heads, "
        f"{mean(best['accuracy']).spelled()} of the lists right. One layer of 4 or more heads against two of 2: "
        + "; ".join(f"{name} {gap.signed()}" for name, gap in b7_listops._contests(found).items())
        + f". Verdict on the paper's claim: {b7_listops.verdict(found)}."
    )


def encoders(found: dict[str, Any]) -> str:
    """An encoder pair on GLUE."""
    models = found["models"]
    gaps = {
        name: difference(b5_encoders.average(model), b5_encoders.average(models["deep"]))
        for name, model in models.items()
        if name != "deep"
    }
    told = "; ".join(f"{name} {gap.signed(1)}" for name, gap in gaps.items())
    loss = mean(models["deep"]["masked_loss"]).mean
    return (
        f"GLUE average against {models['deep']['depth']} layers of {models['deep']['heads']} heads, in points: {told}. "
        f"Masked loss {loss:.2f}"
        + (": too early in pretraining to prefer either." if loss > b5_encoders.BEGUN * math.log(VOCABULARY) else ".")
    )


RULES = (
    Rule("Depth or width?", ("b6_decoders",), depth_or_width),
    Rule("What do fewer layers cost?", ("b6_decoders", "b3_grid"), fewer_layers),
    Rule("More heads?", ("b2_conditioning", "b3_grid", "b6_decoders"), more_heads),
    Rule("Is conditioning a goal?", ("b2_conditioning",), conditioning_rule),
    Rule("Should layers differ?", ("b8_design",), tapering),
    Rule("Thirty percent fewer parameters?", ("b8_design",), budget_rule),
    Rule("Long lists and cheap attention?", ("b7_listops",), long_lists),
    Rule("Encoders?", ("b5_encoders",), encoders),
)
