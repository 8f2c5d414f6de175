"""What the results say to someone who designs a model, as data: for docs/DESIGN_RULES.md and for `headwise advise`.

An item is one comparison between two shapes, with its interval, the sizes that it was measured at and the file that it
comes from. It speaks for a statement ("for"), against it, or is undecided or void by the rules of `_judge`, with Holm's
correction over all items of a topic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import _claims_a
from experiments._claims_b import ACCURACY, NATS
from experiments._judge import Contest, edges_of, outcomes, paired, short_of_tokens

Found = Mapping[str, Any]
STEEPER = 0.25  # by which the slope of later layers should be lower, if they saturate and early ones do not
WIDTHS = {"embedded": 256, "stories15M": 288, "smollm2": 576, "minilm": 384}


class Where(NamedTuple):
    """What was trained or measured: ranges of sizes, both ends included."""

    kind: str  # text, images, lists
    width: tuple[int, int]
    layers: tuple[int, int]
    context: tuple[int, int]


class Item(NamedTuple):
    """One comparison and where it was measured."""

    contest: Contest
    unit: str
    where: Where
    source: str  # name of the experiment


class Topic(NamedTuple):
    """A question of a designer, the statement that items speak for or against, and the items."""

    name: str
    question: str
    statement: str
    items: Callable[[Mapping[str, Found]], Iterator[Item]]


def _span(models: Sequence[Found], key: str) -> tuple[int, int]:
    values = [int(model[key]) for model in models]
    return min(values), max(values)


def _text(found: Found, one: str, other: str, what: str) -> Iterator[Item]:
    """Two decoders of B6; gain: how much lower the first one's loss is."""
    models = found["models"]
    if not {one, other} <= set(models):
        return
    pair = [models[one], models[other]]
    failed = short_of_tokens(found["tokens"], pair[1]["parameters"]) + edges_of(models, one, other)
    contest = paired(what, pair[1]["loss"], pair[0]["loss"], NATS, failed=failed)
    length = int(found.get("length", 256))
    where = Where("text", _span(pair, "width"), _span(pair, "depth"), (length, length))
    yield Item(contest, "nats", where, "b6_decoders")


def _images(cells: Mapping[str, Found], one: str, other: str, what: str, source: str) -> Iterator[Item]:
    """Two models on images; gain: how much higher the first one's accuracy is."""
    if {one, other} <= set(cells):
        pair = [cells[one], cells[other]]
        untold = [f"best learning rate {cell['rate']:g}, one of two tried" for cell in pair if not cell.get("rates")][
            :1
        ]
        failed = edges_of(cells, one, other) + untold
        contest = paired(what, pair[0]["accuracy"], pair[1]["accuracy"], ACCURACY, failed=failed)
        yield Item(contest, "accuracy", Where("images", _span(pair, "width"), _span(pair, "depth"), (64, 64)), source)


def heads(results: Mapping[str, Found]) -> Iterator[Item]:
    """More heads of fewer dimensions at one width."""
    if found := results.get("q5_headdim"):
        from experiments.q5_headdim import items

        yield from items(found)
    if found := results.get("b6_decoders"):
        yield from _text(found, "lean", "lean, 12 heads", "16 heads of 24 instead of 12 of 32, 4 layers")
        yield from _text(found, "deep, 16 heads", "deep", "16 heads of 24 instead of 12 of 32, 12 layers")
    if found := results.get("b3_grid"):
        for depth in (4, 8, 12):
            names = [f"{depth} layers, {count} heads, MLP 768" for count in (12, 3)]
            yield from _images(found["cells"], *names, f"12 heads of 16 instead of 3 of 64, {depth} layers", "b3_grid")
    if found := results.get("b2_conditioning"):
        rows = {str(row["heads"]): row for row in found["split"]}
        for count in ("12", "48"):
            what = f"{count} heads of {found['width'] // int(count)} instead of 3 of 64, 4 layers"
            yield from _images(rows, count, "3", what, "b2_conditioning")


def wider_attention(results: Mapping[str, Found]) -> Iterator[Item]:
    """More heads of one dimension: attention grows, and its parameters with it."""
    if found := results.get("b2_conditioning"):
        rows = {str(row["heads"]): row for row in found["grown"]}
        dim = found["dim"]
        yield from _images(rows, "24", "3", f"24 heads of {dim} instead of 3 of {dim}, 4 layers", "b2_conditioning")
    if found := results.get("b3_grid"):
        for depth in (4, 8, 12):
            names = [f"{depth} layers, {count} heads, MLP 768, grown" for count in (12, 3)]
            yield from _images(found["cells"], *names, f"12 heads of 64 instead of 3 of 64, {depth} layers", "b3_grid")


def width_for_depth(results: Mapping[str, Found]) -> Iterator[Item]:
    """Fewer, wider layers at about equal parameters."""
    if found := results.get("b6_decoders"):
        yield from _text(found, "wide lean", "deep", "4 layers of width 640 instead of 12 of 384")
        yield from _text(found, "lean", "narrow deep", "4 layers of width 384 instead of 12 of 224")
    if found := results.get("q4_design"):
        models = found["models"]
        names = [name for name in models if name.startswith("leaner")]
        flat = next((name for name in models if name.startswith("uniform")), None)
        for name in names if flat is not None else []:
            pair, seeds = [models[name], models[flat]], min(len(models[name]["loss"]), len(models[flat]["loss"]))
            failed = short_of_tokens(found["tokens"], pair[1]["parameters"]) + edges_of(models, name, flat)
            losses = [model["loss"][:seeds] for model in reversed(pair)]
            contest = paired(f"{name} instead of 12, equal parameters", *losses, NATS, failed=failed)
            yield Item(
                contest, "nats", Where("text", _span(pair, "width"), _span(pair, "depth"), (256, 256)), "q4_design"
            )


def fewer_layers(results: Mapping[str, Found]) -> Iterator[Item]:
    """Layers left out with nothing in exchange."""
    if found := results.get("b6_decoders"):
        yield from _text(found, "lean", "deep", "4 layers of 16 heads instead of 12 of 12")
    if found := results.get("b3_grid"):
        for depth in (8, 4):
            names = [f"{count} layers, 3 heads, MLP 768" for count in (depth, 12)]
            yield from _images(found["cells"], *names, f"{depth} layers instead of 12, 3 heads", "b3_grid")


def uneven_layers(results: Mapping[str, Found]) -> Iterator[Item]:
    """Layers that differ, in place of layers alike."""
    if found := results.get("q6_scratch"):
        from experiments.q6_scratch import items

        yield from items(found)
    if found := results.get("a8_taper"):
        for contest in _claims_a.a8_cutting(dict(found)):
            name, _, budget = contest.what.partition(", ")
            rows = next(m for key, m in found["models"].items() if key == name)
            layers = len(rows["rows"][0]["sizes"])
            where = Where("text", (WIDTHS[name],) * 2, (layers, layers), (rows["length"],) * 2)
            what = f"taper instead of equal sizes, {name} cut to {budget.rstrip(':').partition('@')[0]}"
            yield Item(contest._replace(what=what), "nats", where, "a8_taper")


def early(results: Mapping[str, Found]) -> Iterator[Item]:
    """Slopes of the softmax Jacobian's norm over length: the first half of a trained model's layers less the second."""
    if found := results.get("a6_saturation"):
        for name, model in found["models"].items():
            slopes = np.array([row["slope"] for row in model["layers"]])
            first, last = np.array_split(slopes, 2)
            error = float(np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last)))
            gain = float(first.mean() - last.mean())
            what = f"second half of the {len(slopes)} layers of {name} below the first, in slope"
            lengths = (model["lengths"][0], model["lengths"][-1])
            where = Where("text", (WIDTHS[name],) * 2, (len(slopes),) * 2, lengths)
            yield Item(Contest(what, gain, error, len(slopes) - 2, STEEPER), "", where, "a6_saturation")


TOPICS = (
    Topic("heads", "More heads of fewer dimensions?", "more heads at the same width are better", heads),
    Topic(
        "wider_attention",
        "More heads, and so wider attention?",
        "heads that widen attention are better",
        wider_attention,
    ),
    Topic("width_for_depth", "Width instead of depth?", "fewer and wider layers are better", width_for_depth),
    Topic("fewer_layers", "What do fewer layers cost?", "fewer layers are better", fewer_layers),
    Topic("uneven_layers", "Should layers differ?", "layers that differ are better", uneven_layers),
    Topic("early", "Where do early layers end?", "later layers saturate more than early ones", early),
)


def judged_items(results: Mapping[str, Found]) -> dict[str, list[tuple[Item, str]]]:
    """Every topic's items with what became of each."""
    found = {}
    for topic in TOPICS:
        items = list(topic.items(results))
        found[topic.name] = list(zip(items, outcomes([item.contest for item in items]), strict=True))
    return found


def written(entries: Sequence[Any]) -> str:
    """What `headwise advise` knows, as JSON."""
    kept = {entry.name: entry for entry in entries if entry.result is not None}
    topics = judged_items({name: entry.found for name, entry in kept.items()})
    told = {
        topic.name: {
            "question": topic.question,
            "statement": topic.statement,
            "items": [_plain(item, word, kept[item.source]) for item, word in topics[topic.name]],
        }
        for topic in TOPICS
    }
    return json.dumps(told, indent=1) + "\n"


def _plain(item: Item, word: str, entry: Any) -> dict[str, Any]:
    interval = item.contest.interval
    return {
        "what": item.contest.what,
        "gain": round(interval.mean, 5),
        "low": round(interval.low, 5),
        "high": round(interval.high, 5),
        "unit": item.unit,
        "margin": round(item.contest.margin, 5),
        "outcome": word,
        "void": list(item.contest.failed),
        "measured": item.where._asdict(),
        "source": f"experiments/results/{item.source}.json",
        "made_by_present_code": entry.made_by.startswith("Made by the present"),
    }
