"""A7: can a 64-dimensional head be replaced by a 4-dimensional one? Every head alone, then all heads at once.

Heads are reduced by hooks around the softmax (`_finetune.Narrow`), along directions from calibration text
(`activations`) or from the weights alone (`weights`: the truncated SVD of the paper). A single reduced head is measured
as it is, and after a short training of its factors and of its layer's q, k, v and o; then all heads of all layers,
before and after training everything. Dimension 0 is the head removed, and the full dimension the same training without
a cut: the two ends to compare with.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments._finetune import (
    Damage,
    Narrow,
    Reference,
    by_activations,
    by_weights,
    finetune,
    narrowed,
    only,
)
from experiments._models import available, settings_for
from experiments._points import rounded
from experiments._training import minimise
from headwise import pipeline
from headwise.errors import ModelError
from headwise.progress import Track

CLAIM = "A7"
TITLE = "Four-dimensional heads"
SMALL = 0.001  # nats per token that one head may cost: 0.1% of the perplexity
SMALL_TOGETHER = 0.01  # nats per token that all heads together may cost: 1%
MOST = 0.5  # more than this share of the heads must stay below
SEED = 0
WAYS = ("activations", "weights")
PARTS = ("both", "qk", "v")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. Rows are blocks of `length` tokens; training and evaluation share none."""

    length: int
    layers: int | None  # how many, spread over the depth; None: all
    heads: int | None  # per layer, spread
    dims: tuple[int, ...]
    moment_rows: int
    head_rows: int  # that single heads are fine-tuned on, the source's predictions kept
    train_rows: int  # that all heads together are fine-tuned on, at most
    eval_rows: int
    head_steps: int
    head_batch: int  # tokens
    steps: int
    batch: int  # tokens
    head_rate: float = 2e-4  # more does harm where the damage is small to begin with
    rate: float = 1e-3
    parts: tuple[str, ...] = PARTS


EFFORTS = {  # in the order of the fields
    "tiny": Effort(32, 2, 1, (8, 4), 4, 4, 8, 2, 1, 64, 1, 64),
    "small": Effort(128, None, 2, (16, 4), 128, 64, 512, 16, 10, 1024, 30, 2048),
    "full": Effort(512, None, None, (32, 16, 8, 4), 128, 256, 3000, 32, 20, 8192, 200, 16384),
}
SMOLLM2 = Effort(512, None, None, (32, 16, 8, 4), 64, 0, 74, 8, 0, 0, 0, 0, parts=("both",))  # before fine-tuning only


class Setting(NamedTuple):
    """One way to reduce a head."""

    way: str
    part: str
    dim: int


class Bench:
    """A model, its text and its directions; measures reductions of it."""

    def __init__(self, name: str, effort: Effort, device: str, assets: Path | None, track: Track) -> None:
        self.effort = effort
        tokens = (effort.train_rows * effort.length, effort.eval_rows * effort.length, 0)
        desk = pipeline.load_source(settings_for(name, assets, device, tokens, effort.length, seed=SEED), track)
        self.family, self.source, self.train = desk.family, desk.model.requires_grad_(False), desk.calibration
        self.student = self.family.tailor(self.source).requires_grad_(False)  # trained and put back, head after head
        self.evaluation = Reference(self.family, self.source, desk.evaluation)
        self.blocks = self.family.blocks(self.student)
        attention = self.blocks[0].attention
        self.width, self.heads = attention.v_dim, _spread(attention.query_heads, effort.heads)
        self.layers = _spread(len(self.blocks), effort.layers)
        self.directions = {
            "activations": by_activations(self.family, self.source, self.train[: effort.moment_rows]),
            "weights": by_weights(self.family, self.source, effort.length),
        }

    def narrow(self, setting: Setting, layer: int, heads: Sequence[int]) -> Narrow:
        """The factors of a setting."""
        return Narrow(heads, self.directions[setting.way][layer], setting.dim, setting.part)

    def before(self, setting: Setting, layer: int, head: int) -> Damage:
        """The damage of one reduced head, nothing trained."""
        with narrowed(self.blocks, {layer: self.narrow(setting, layer, (head,))}):
            return self.evaluation.damage(self.student, layer)

    def after(self, lessons: Reference, setting: Setting, layer: int, head: int) -> Damage:
        """The damage of one reduced head after its factors and its layer's q, k, v and o were trained."""
        effort, narrow, attention = self.effort, self.narrow(setting, layer, (head,)), self.blocks[layer].attention
        weights = [p for name in "qkvo" for p in getattr(attention, f"{name}_proj").parameters()]
        saved, chosen = [weight.clone() for weight in weights], [*weights, *narrow.parameters()]
        with narrowed(self.blocks, {layer: narrow}):
            with only(self.student, chosen):
                minimise(
                    lambda rows: lessons.divergence(self.student, rows, layer),
                    chosen,
                    len(lessons.tokens),
                    effort.head_batch // effort.length,
                    effort.head_steps,
                    effort.head_rate,
                    SEED,
                )
            found = self.evaluation.damage(self.student, layer)
        for weight, value in zip(weights, saved, strict=True):
            weight.copy_(value)
        return found

    def together(self, way: str, dim: int) -> dict[str, Any]:
        """All heads of all layers at one dimension, before and after all parameters were trained."""
        effort, student = self.effort, self.family.tailor(self.source)
        heads, setting = range(self.blocks[0].attention.query_heads), Setting(way, "both", dim)
        narrows = {layer: self.narrow(setting, layer, heads) for layer in range(len(self.blocks))}
        with narrowed(self.family.blocks(student), narrows):
            found = {"way": way, "dim": dim, "before": self.evaluation.damage(student)._asdict()}
            if effort.steps:
                chosen = [*student.parameters(), *(p for narrow in narrows.values() for p in narrow.parameters())]
                fast = student.device.type == "cuda"  # bfloat16's floor is far below what all heads at once cost
                how = dict(batch_tokens=effort.batch, rate=effort.rate, seed=SEED, parameters=chosen, bf16=fast)
                found["training"] = finetune(self.family, self.source, student, self.train, effort.steps, **how)
                found["after"] = self.evaluation.damage(student)._asdict()
        return found


def _spread(count: int, wanted: int | None) -> list[int]:
    """Some of `count` numbers, from the first to the last.

    >>> _spread(8, 2)
    [0, 7]
    """
    return sorted({int(i) for i in np.linspace(0, count - 1, wanted or count).round()})


def study(bench: Bench, track: Track, done: dict[str, Any]) -> dict[str, Any]:
    """Everything about one model; what is in `done` is not done again."""
    effort, least = bench.effort, bench.effort.dims[-1]
    if "before" not in done:
        settings = [Setting(*three) for three in itertools.product(WAYS, effort.parts, effort.dims)]
        done["before"] = _table(bench, [*settings, Setting("activations", "both", 0)], bench.before, False, track)
    if effort.head_steps and "after" not in done:
        lessons = Reference(bench.family, bench.source, bench.train[: effort.head_rows])
        settings = [Setting("activations", "both", dim) for dim in (*effort.dims, 0, bench.width)]
        settings.append(Setting("weights", "both", least))
        done["after"] = _table(bench, settings, functools.partial(bench.after, lessons), True, track)
    single = [*done["before"], *done.get("after", [])]
    pairs = [*itertools.product(WAYS, effort.dims), ("activations", bench.width)]
    for way, dim in track(pairs, "all heads at once"):
        if f"{way} {dim}" not in done:
            done[f"{way} {dim}"] = bench.together(way, dim)
    found = {
        "layers": bench.layers,
        "effort": asdict(effort),
        "tokens": {"training": bench.train.numel(), "evaluation": bench.evaluation.tokens.numel()},
        "single": single,
        "together": [done[f"{way} {dim}"] for way, dim in pairs],
        "depth": {
            "tuned" if record["tuned"] else "untuned": depth_correlation(np.array(record["kl"]))
            for record in single
            if (record["way"], record["part"], record["dim"]) == ("activations", "both", least)
        },
    }
    return rounded(found, 4)


def _table(bench: Bench, settings: list[Setting], measure: Any, tuned: bool, track: Track) -> list[dict[str, Any]]:
    """Every setting for every layer and head; the control without a cut for one head of each layer."""
    heads = {setting: bench.heads[:1] if setting.dim == bench.width else bench.heads for setting in settings}
    jobs = [(setting, *place) for setting in settings for place in itertools.product(bench.layers, heads[setting])]
    label = "single heads, fine-tuned" if tuned else "single heads"
    found = {job: measure(*job) for job in track(jobs, label)}
    records = []
    for setting in settings:
        rows = [[found[setting, layer, head] for head in heads[setting]] for layer in bench.layers]
        table = {name: [[getattr(d, name) for d in row] for row in rows] for name in Damage._fields}
        kl = np.array(table["kl"])
        summary = {
            "layer_kl": kl.mean(1).tolist(),
            "layer_kl_se": _error(kl).tolist(),
            "mean_kl": float(kl.mean()),
            "mean_kl_se": float(_error(kl.ravel())),
            "median_kl": float(np.median(kl)),
            "mean_loss": float(np.mean(table["loss"])),
            "mean_loss_se": float(_error(np.ravel(table["loss"]))),
            "below": float((kl < SMALL).mean()),
            "below_tenfold": float((kl < 10 * SMALL).mean()),
        }
        records.append({**setting._asdict(), "tuned": tuned, "heads": heads[setting], **summary, **table})
    return records


def _error(values: np.ndarray) -> np.ndarray:
    """Standard error of the mean over the last axis; zero where there is one value."""
    count = values.shape[-1]
    return values.std(-1, ddof=min(1, count - 1)) / np.sqrt(count)


def depth_correlation(kl_LH: np.ndarray, draws: int = 2000) -> dict[str, float]:
    """Spearman's correlation of a layer's mean damage with its depth; 95% interval by drawing heads anew in each layer.

    >>> depth_correlation(np.array([[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]]))
    {'rho': 1.0, 'low': 1.0, 'high': 1.0}
    """
    layers, heads = kl_LH.shape
    chosen = np.random.default_rng(SEED).integers(0, heads, (draws, layers, heads))
    means = np.concatenate((kl_LH.mean(1)[None], np.take_along_axis(kl_LH[None], chosen, 2).mean(2)))
    steps = means.argsort(1).argsort(1) - np.arange(layers)
    rho = 1 - 6 * (steps**2).sum(1) / (layers * (layers**2 - 1))
    low, high = np.quantile(rho[1:], [0.025, 0.975])
    return {"rho": float(rho[0]), "low": float(low), "high": float(high)}


def run(size: str, device: str, assets: Path | None, track: Track, parts: dict[str, Any]) -> dict[str, Any]:
    """The embedded model at every size; SmolLM2 before fine-tuning too where it is at hand, at full size."""
    found: dict[str, Any] = {"seeds": [SEED], "small": SMALL, "small_together": SMALL_TOGETHER, "models": {}}
    efforts = {"embedded": EFFORTS[size], **({"smollm2": SMOLLM2} if size == "full" else {})}
    found["left_out"] = {name: "not among the assets" for name in efforts if name not in available(assets)}
    for name in available(assets, tuple(efforts)):
        try:
            bench = Bench(name, efforts[name], device, assets, track)
        except ModelError as error:  # a format that this machine cannot read must not cost the others' result
            found["left_out"][name] = str(error)
            continue
        found["models"][name] = study(bench, track, parts if name == "embedded" else {})
    return found


def _pick(records: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(r for r in records if all(r[key] == value for key, value in wanted.items()))


def _single(result: dict[str, Any], dim: int | None = None, tuned: bool = True, model: str = "embedded") -> Any:
    """Single heads, both parts reduced along activations, at a dimension, the smallest unless said."""
    found = result["models"][model]
    dim = found["effort"]["dims"][-1] if dim is None else dim
    return _pick(found["single"], way="activations", part="both", dim=dim, tuned=tuned)


def measured(result: dict[str, Any]) -> str:
    """The numbers in words."""
    found = result["models"]["embedded"]
    dims, control = found["effort"]["dims"], max(r["dim"] for r in found["single"])

    def cost(dim: int, tuned: bool, model: str = "embedded") -> str:
        record = _single(result, dim, tuned, model)
        return f"{record['mean_kl']:.2g} ± {record['mean_kl_se']:.1g}"

    least, kept = dims[-1], _single(result)
    whole = [_pick(found["together"], way="activations", dim=dim) for dim in dims]
    stages = [
        " / ".join(f"{w[stage]['kl']:.2g} ± {w[stage]['kl_se']:.1g}" for w in whole) for stage in ("before", "after")
    ]
    sizes, rho = "/".join(map(str, dims)), found["depth"]["tuned"]
    smol = ""
    if "smollm2" in result["models"]:
        other = result["models"]["smollm2"]["depth"]["untuned"]
        smol = (
            f" SmolLM2, untrained: one head at {least} costs {cost(least, False, 'smollm2')}, depth correlation "
            f"{other['rho']:.2f} [{other['low']:.2f}, {other['high']:.2f}]."
        )
    return (
        f"One head at {least} of {control} dimensions costs {cost(least, False)} nats per token (mean over heads) and "
        f"{cost(least, True)} after fine-tuning, median {kept['median_kl']:.2g}, {kept['below']:.0%} of the heads less "
        f"than {SMALL:g} and {kept['below_tenfold']:.0%} less than {10 * SMALL:g}; removed altogether {cost(0, False)} "
        f"and {cost(0, True)}; the same training without a cut {cost(control, True)}; correlation with depth "
        f"{rho['rho']:.2f} [{rho['low']:.2f}, {rho['high']:.2f}]. All heads at once at {sizes}: {stages[0]} nats, and "
        f"{stages[1]} after {whole[0]['training']['tokens'] / 1e6:.3g}M tokens of fine-tuning.{smol}"
    )


def draw(result: dict[str, Any], figure: Any) -> None:
    """Left: single heads by layer. Right: all heads at once by dimension."""
    found = result["models"]["embedded"]
    left, right = figure.subplots(1, 2)
    least = found["effort"]["dims"][-1]
    for label, dim, tuned, colour, line in (
        (f"{least} dimensions", least, False, "#0072B2", "--"),
        (f"{least} dimensions, fine-tuned", least, True, "#0072B2", "-"),
        ("removed, fine-tuned", 0, True, "#D55E00", "-"),
    ):
        record = _single(result, dim, tuned)
        left.errorbar(
            found["layers"], record["layer_kl"], record["layer_kl_se"], label=label, color=colour, ls=line, capsize=2
        )
    left.axhline(SMALL, color="0.6", lw=0.8)
    left.set(yscale="log", xlabel="layer", ylabel="KL, nats per token", title="one head at a time")
    for (way, colour), (stage, line) in itertools.product(
        zip(WAYS, ("#0072B2", "#E69F00"), strict=True), (("before", "--"), ("after", "-"))
    ):
        points = [r for r in found["together"] if r["way"] == way and r["dim"] in found["effort"]["dims"]]
        heights, errors = ([r[stage][key] for r in points] for key in ("kl", "kl_se"))
        label = f"{way}, {stage} fine-tuning"
        right.errorbar([r["dim"] for r in points], heights, errors, label=label, color=colour, ls=line, capsize=2)
    right.set(xscale="log", yscale="log", xlabel="dimensions per head", title="all heads at once")
    right.set_xticks(found["effort"]["dims"], [str(dim) for dim in found["effort"]["dims"]])
    right.set_xticks([], minor=True)
    for axes in (left, right):
        axes.legend(fontsize=7)
