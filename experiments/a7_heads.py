"""A7: can a 64-dimensional head be replaced by a 4-dimensional one? Every head alone, then all heads at once.

Heads are reduced by hooks around the softmax (`_finetune.Narrow`), along directions from calibration text
(`activations`) or from the weights alone (`weights`: the truncated SVD of the paper). A single reduced head is measured
as it is, and after a short training of its factors and of its layer's q, k, v and o; then all heads of all layers,
before and after training everything. Dimension 0 is the head removed, and the full dimension the same training without
a cut: the two ends to compare with. The paper's corollary says that the error of a small head falls with the length of
the text, so the damage of single reduced heads is also told by position.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments._bench import SEED, WAYS, Bench, Effort, Setting, standard_error
from experiments._finetune import Damage, Reference
from experiments._models import available
from experiments._points import rounded
from headwise.errors import ModelError
from headwise.progress import Track

CLAIM = "A7"
TITLE = "Four-dimensional heads"


EFFORTS = {  # in the order of the fields
    "tiny": {"embedded": Effort(32, 2, 1, (8, 4), 4, 4, 8, 2, 1, 64, 1, 64, parts=("both",), long=(2, 64))},
    "small": {"embedded": Effort(128, None, 2, (16, 4), 128, 64, 512, 16, 10, 1024, 30, 2048)},
    "full": {
        "embedded": Effort(512, None, None, (32, 16, 8, 4), 128, 256, 3000, 32, 20, 8192, 200, 16384, long=(16, 1024)),
        "stories15M": Effort(256, None, None, (16, 4), 128, 256, 2000, 64, 20, 8192, 200, 16384, long=(64, 256)),
        "smollm2": Effort(512, 6, 3, (16, 4), 64, 48, 74, 8, 20, 4096, 60, 8192, long=(4, 2048)),
    },
}


def study(bench: Bench, track: Track, done: dict[str, Any]) -> dict[str, Any]:
    """Everything about one model; what is in `done` is not done again."""
    effort, least = bench.effort, bench.effort.dims[-1]
    if "before" not in done:
        settings = [Setting(*three) for three in itertools.product(WAYS, effort.parts, effort.dims)]
        done["before"] = _table(bench, [*settings, Setting("activations", "both", 0)], bench.before, False, track)
    if effort.head_steps and "after" not in done:
        lessons = Reference(bench.family, bench.source, bench.train[: effort.head_rows])
        settings = [Setting("activations", "both", dim) for dim in (*effort.dims, 0, bench.width)]
        settings += [Setting("activations", part, least) for part in effort.parts if part != "both"]
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
            "layer_kl_se": standard_error(kl).tolist(),
            "mean_kl": float(kl.mean()),
            "mean_kl_se": float(standard_error(kl.ravel())),
            "median_kl": float(np.median(kl)),
            "mean_loss": float(np.mean(table["loss"])),
            "mean_loss_se": float(standard_error(np.ravel(table["loss"]))),
        }
        records.append({**setting._asdict(), "tuned": tuned, "heads": heads[setting], **summary, **table})
    return records


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
    """The embedded model at every size; at full size others too, where they are at hand."""
    found: dict[str, Any] = {"seeds": [SEED], "models": {}}
    efforts = EFFORTS[size]
    found["left_out"] = {name: "not among the assets" for name in efforts if name not in available(assets)}
    for name in available(assets, tuple(efforts)):
        try:
            bench = Bench(name, efforts[name], device, assets, track)
        except ModelError as error:  # a format that this machine cannot read must not cost the others' result
            found["left_out"][name] = str(error)
            continue
        done = {key.partition(": ")[2]: value for key, value in parts.items() if key.startswith(f"{name}: ")}
        found["models"][name] = study(bench, track, _Named(name, done, parts))
        if effort := efforts[name].long[0]:
            if (key := f"{name}: by position, {effort} rows") not in parts:
                parts[key] = bench.by_position(device, assets, track)
            found["models"][name]["by_position"] = parts[key]
    return found


class _Named(dict[str, Any]):
    """The parts of one model: what is set here is kept under its name."""

    def __init__(self, name: str, done: dict[str, Any], parts: dict[str, Any]) -> None:
        super().__init__(done)
        self.name, self.parts = name, parts

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.parts[f"{self.name}: {key}"] = value


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
    others = "".join(_other(name, model) for name, model in result["models"].items() if name != "embedded")
    return (
        f"One head at {least} of {control} dimensions costs {cost(least, False)} nats per token (mean over heads) and "
        f"{cost(least, True)} after fine-tuning, median {kept['median_kl']:.2g}; removed altogether {cost(0, False)} "
        f"and {cost(0, True)}; the same training without a cut {cost(control, True)}; correlation with depth "
        f"{rho['rho']:.2f} [{rho['low']:.2f}, {rho['high']:.2f}]. All heads at once at {sizes}: {stages[0]} nats, and "
        f"{stages[1]} after {whole[0]['training']['tokens'] / 1e6:.3g}M tokens of "
        f"fine-tuning.{positions(found)}{others}"
    )


def positions(model: dict[str, Any]) -> str:
    """Damage by the position that it is measured at, in words."""
    if (found := model.get("by_position")) is None:
        return ""
    told = ", ".join(f"{k:.2g} ± {e:.1g}" for k, e in zip(found["kl"], found["kl_se"], strict=True))
    return f" By positions up to {', '.join(map(str, found['ends']))}: {told}."


def _other(name: str, model: dict[str, Any]) -> str:
    """Another model in a sentence."""
    least = model["effort"]["dims"][-1]
    kl = {
        (r["dim"], r["part"]): f"{r['mean_kl']:.2g} ± {r['mean_kl_se']:.1g}"
        for r in model["single"]
        if r["tuned"] and r["way"] == "activations" and r["dim"] in (least, 0)
    }
    told = ", ".join(f"{part} at {dim} {words}" for (dim, part), words in kl.items())
    return f" {name}, one head, tuned: {told}.{positions(model)}" if told else ""


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
