"""A6: does the softmax saturate as the text gets longer, on trained models and real text?

The claim: the spectral norm of the softmax Jacobian `diag(p) - p p'` falls as O(1/L). Decoders read blocks of real
text once; the row at position L - 1 sees exactly L keys. The encoder reads each text cut to L tokens, and sixteen of
its rows are averaged. For every head a slope of log norm over log L is fitted per sequence (L = 4, 8, 16, ... as far as
the model's context goes); errors are standard errors over sequences.

A head follows the law if its slope is below -0.75, unless its norm falls because the head settles on one token (mean
largest weight above one half at the longest L): that is the opposite of getting flat. A head stays sharp if its slope
is above -0.25. The control is the same architecture with random weights, where logits are bounded as the theory asks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import kendalltau, spearmanr

from experiments._points import rounded
from experiments._provenance import used
from headwise import data, families
from headwise.data import own_text
from headwise.errors import HeadwiseError
from headwise.families._watch import batches
from headwise.probes.saturation import SoftmaxRows, joined, lengths_up_to, mean_and_error, norms_at, rows_of, slopes
from headwise.progress import Track, silently

CLAIM = "A6"
TITLE = "Softmax saturation"

FOLLOWS, SHARP, SETTLED = -0.75, -0.25, 0.5  # slopes, and a largest weight: see above
ENCODER_ROWS = 16
HOOK = "headwise_a6"
See = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, float], SoftmaxRows]


class Effort(NamedTuple):
    """How much is measured."""

    sequences: int
    longest: int
    models: tuple[str, ...]
    random_draws: int  # of the control's weights


EFFORTS = {
    "tiny": Effort(4, 64, ("embedded",), 1),
    "small": Effort(6, 1024, ("embedded", "stories15M", "smollm2", "minilm"), 1),
    "full": Effort(64, 1024, ("embedded", "stories15M", "smollm2", "minilm"), 3),
}


class Subject(NamedTuple):
    """A model and the rows of token ids that it reads."""

    model: torch.nn.Module
    tokens: torch.Tensor
    text: str  # where it comes from
    ends: tuple[int, int] | None = None  # an encoder's first and last token


def run(size: str, device: str, assets: Path | None, track: Track = silently) -> dict[str, Any]:
    """Slopes per model, layer and head, and those of the same architectures with random weights."""
    effort = EFFORTS[size]
    found: dict[str, Any] = {"models": {}, "random": {}, "left_out": {}, "seeds": list(range(effort.random_draws))}
    for name in track(effort.models, "models"):
        try:
            subject = open_subject(name, effort, device, assets)
        except (HeadwiseError, OSError, ImportError) as error:
            found["left_out"][name] = " ".join(str(error).split())
            continue
        lengths, layers = measure(subject)
        found["models"][name] = {**described(layers, lengths), "text": subject.text}
        draws = [measure(subject._replace(model=random_like(subject.model, seed)))[1] for seed in found["seeds"]]
        pooled = [joined(list(parts), axis=0) for parts in zip(*draws, strict=True)]
        found["random"][name] = {**described(pooled, lengths), "text": subject.text}
    return rounded(found, 5)


def open_subject(name: str, effort: Effort, device: str, assets: Path | None) -> Subject:
    """A model with its text; raises where files are absent or cannot be read here."""
    if name != "embedded" and (assets is None or not (assets / name).is_dir()):
        raise HeadwiseError("not among the assets")
    if name == "minilm":
        assert assets is not None
        return open_encoder(assets, effort, device)
    where = families.EMBEDDED
    if name != "embedded" and assets is not None:
        packed = sorted((assets / name).glob("*.gguf"))
        where = str(packed[0] if packed and not (assets / name / "config.json").exists() else assets / name)
    used(Path(families.locate(where)[0]), name)
    model, tokenizer = families.load(where, device)
    length = min(effort.longest, int(model.config.max_position_embeddings))
    source = "stdlib" if name == "embedded" else text_of(assets, "stories" if name == "stories15M" else "wikitext")
    if source is None:
        return Subject(model, own_text.written_by(model, effort.sequences, length), "its own text")
    tokens = data.blocks_of(data.documents(source), tokenizer, length, effort.sequences, source)
    return Subject(model, tokens, Path(source).name)


def open_encoder(assets: Path, effort: Effort, device: str) -> Subject:
    """MiniLM: a BERT, which reads in both directions."""
    from transformers import AutoModel, AutoTokenizer

    used(assets / "minilm")
    with families.quietly():
        model = AutoModel.from_pretrained(assets / "minilm", dtype=torch.float32).eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(assets / "minilm")
    source = text_of(assets, "wikitext") or "stdlib"
    length = min(effort.longest, int(model.config.max_position_embeddings))
    tokens = data.blocks_of(data.documents(source), tokenizer, length, effort.sequences, source)
    return Subject(model, tokens, Path(source).name, (tokenizer.cls_token_id, tokenizer.sep_token_id))


def text_of(assets: Path | None, word: str) -> str | None:
    """The first text file whose name holds a word."""
    files = sorted((assets / "text").glob(f"*{word}*.txt")) if assets is not None else []
    return str(used(files[0])) if files else None


def random_like(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A model of this architecture with random weights, as before training."""
    torch.manual_seed(seed)
    config = copy.deepcopy(model.config)
    return type(model)(config).eval().to(model.device)


@contextmanager
def seeing(model: torch.nn.Module, see: See) -> Iterator[list[SoftmaxRows]]:
    """Look at the queries and keys of every softmax of a stock model; what was seen is listed in the layers' order."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen: list[SoftmaxRows] = []

    def attend(
        module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **more: Any
    ) -> Any:
        seen.append(see(module, q, k, more["scaling"]))
        return sdpa_attention_forward(module, q, k, v, mask, **more)

    AttentionInterface.register(HOOK, attend)
    AttentionMaskInterface.register(HOOK, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(HOOK)
    try:
        yield seen
    finally:
        model.set_attn_implementation(before)


def measure(subject: Subject) -> tuple[tuple[int, ...], list[SoftmaxRows]]:
    """Lengths, and per layer what the rows look like (sequence, head, length)."""
    lengths = lengths_up_to(subject.tokens.shape[1])
    if subject.ends is None:
        return lengths, read_causally(subject.model, subject.tokens[:, : lengths[-1]], lengths)
    parts = [read_both_ways(subject, length) for length in lengths]
    return lengths, [joined(list(layer), axis=-1) for layer in zip(*parts, strict=True)]


@torch.no_grad()
def read_causally(model: torch.nn.Module, tokens: torch.Tensor, lengths: tuple[int, ...]) -> list[SoftmaxRows]:
    """One pass over each block: every length is a row of it."""

    def see(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, scale: float) -> SoftmaxRows:
        return norms_at(q, k, scale, lengths, getattr(module, "sliding_window", None))

    parts = []
    for batch in batches(tokens):
        with seeing(model, see) as seen:
            model.base_model(batch.to(model.device), use_cache=False)
        parts.append(seen)
    return [joined(list(layer), axis=0) for layer in zip(*parts, strict=True)]


@torch.no_grad()
def read_both_ways(subject: Subject, length: int) -> list[SoftmaxRows]:
    """Texts of exactly `length` tokens, the two that mark the ends included; evenly spaced rows, averaged."""
    first, last = (torch.full((len(subject.tokens), 1), end) for end in subject.ends or ())
    tokens = torch.cat((first, subject.tokens[:, : length - 2], last), dim=1)
    places = torch.linspace(0, length - 1, min(length, ENCODER_ROWS)).round().long()

    def see(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, scale: float) -> SoftmaxRows:
        rows = rows_of(q[:, :, places.to(q.device)], k, scale)
        norm = np.exp(np.log(rows.norm).mean(-1, keepdims=True))
        return SoftmaxRows(norm, *(part.mean(-1, keepdims=True) for part in rows[1:]))

    parts = []
    for batch in batches(tokens):
        with seeing(subject.model, see) as seen:
            subject.model(batch.to(subject.model.device))
        parts.append(seen)
    return [joined(list(layer), axis=0) for layer in zip(*parts, strict=True)]


def described(layers: list[SoftmaxRows], lengths: tuple[int, ...]) -> dict[str, Any]:
    """A model's numbers: per layer, over all heads, and how slopes go with depth and with growing logits."""
    whole = joined(layers, axis=1)
    slope, weight = slopes(lengths, whole.norm).mean(0), whole.largest[:, :, -1].mean(0)
    growth = growths(lengths, whole.half_range).mean(0)
    settled = (slope < FOLLOWS) & (weight > SETTLED)
    half = len(lengths) // 2
    late = slopes(lengths[half:], whole.norm[:, :, half:])
    late_mean, late_error = mean_and_error(late.mean(1))
    rows = [layer_numbers(layer, lengths) for layer in layers]
    mean, error = mean_and_error(slopes(lengths, whole.norm).mean(1))
    curve, spread = mean_and_error(np.log(whole.norm).mean(1))
    return {
        "lengths": list(lengths),
        "sequences": len(whole.norm),
        "heads": len(slope),
        "slope": float(mean),
        "slope_error": float(error),
        "slope_median": float(np.median(slope)),
        "norm": np.exp(curve).tolist(),
        "norm_error": (np.exp(curve) * spread).tolist(),
        "share_below": float((slope < FOLLOWS).mean()),
        "share_settled": float(settled.mean()),
        "share_following": float(((slope < FOLLOWS) & ~settled).mean()),
        "share_sharp": float((slope > SHARP).mean()),
        "late_slope": float(late_mean),  # over the longer half of the lengths alone
        "late_slope_error": float(late_error),
        "late_share_following": float(((late.mean(0) < FOLLOWS) & (weight <= SETTLED)).mean()),
        "logit_growth": float(growth.mean()),  # of the half range, per unit of ln L: one half can undo saturation
        "depth": correlation(kendalltau, np.arange(len(rows)), [row["slope"] for row in rows]),
        "slope_with_growth": correlation(spearmanr, growth, slope),
        "layers": rows,
    }


def layer_numbers(rows: SoftmaxRows, lengths: tuple[int, ...]) -> dict[str, Any]:
    """One layer: geometric-mean norms, slopes, half ranges of the logits and largest weights, with standard errors."""
    logs, spread = mean_and_error(np.log(rows.norm).mean(1))
    fitted = slopes(lengths, rows.norm)
    heads, head_errors = mean_and_error(fitted)
    slope, slope_error = mean_and_error(fitted.mean(1))
    half, half_error = mean_and_error(rows.half_range.mean(1))
    grows, grows_error = mean_and_error(growths(lengths, rows.half_range).mean(1))
    return {
        "norm": np.exp(logs).tolist(),
        "norm_error": (np.exp(logs) * spread).tolist(),
        "slope": float(slope),
        "slope_error": float(slope_error),
        "head_slopes": heads.tolist(),
        "head_slope_errors": head_errors.tolist(),
        "share_below": float((heads < FOLLOWS).mean()),
        "share_sharp": float((heads > SHARP).mean()),
        "half_range": half.tolist(),
        "half_range_error": half_error.tolist(),
        "logit_growth": float(grows),
        "logit_growth_error": float(grows_error),
        "largest_weight": rows.largest.mean((0, 1)).tolist(),
    }


def growths(lengths: tuple[int, ...], half_range_BHL: Any) -> Any:
    """Least-squares growth of the logits' half range per unit of ln L, per sequence and head."""
    x = np.log(lengths) - np.log(lengths).mean()
    return half_range_BHL @ x / (x @ x)


def correlation(test: Callable[..., Any], x: Any, y: Any) -> dict[str, float | None]:
    """A rank correlation and its p-value; nothing where ranks are all the same."""
    found = test(x, y)
    value, p = float(found.statistic), float(found.pvalue)
    return {"value": value if np.isfinite(value) else None, "p": p if np.isfinite(p) else None}


def measured(result: dict[str, Any]) -> str:
    """Slopes per model with errors and how many heads follow; the control and the logits; depth."""
    trained, control = result["models"], result["random"]
    parts = [
        f"{name} {m['slope']:.2f} ± {m['slope_error']:.2f} "
        f"({m['share_following']:.0%} of {m['heads']} heads follow 1/L, {m['share_sharp']:.0%} stay sharp)"
        for name, m in trained.items()
    ]
    random = ", ".join(f"{name} {m['slope']:.2f} ± {m['slope_error']:.3f}" for name, m in control.items())
    grown, still = ([m["logit_growth"] for m in part.values()] for part in (trained, control))
    depth = ", ".join(
        f"{name} {m['depth']['value']:+.2f} (p = {m['depth']['p']:.2g})"
        for name, m in trained.items()
        if m["depth"]["value"] is not None
    )
    longest = max(m["lengths"][-1] for m in trained.values())
    return (
        f"Mean slope of log norm over log L, L = 4 to {longest}: {'; '.join(parts)}. With random weights: {random}; "
        f"trained logits grow, their half range by {min(grown):.2f} to {max(grown):.2f} per unit of ln L (random: at "
        f"most {max(still):.2f}; 0.5 can undo the law). Rank correlation of a layer's slope with its depth: {depth}."
    )


COLOURS = {"embedded": "#0072b2", "stories15M": "#e69f00", "smollm2": "#009e73", "minilm": "#cc79a7"}
MARKERS = {"embedded": "o", "stories15M": "s", "smollm2": "^", "minilm": "D"}


def draw(result: dict[str, Any], figure: Any) -> None:
    """Left: norms by length, random weights dashed. Right: every layer's slope by its place in the model."""
    left, right = figure.subplots(1, 2)
    for name, trained in result["models"].items():
        style = dict(color=COLOURS[name], marker=MARKERS[name], markersize=4, linewidth=1.2, capsize=2)
        left.errorbar(trained["lengths"], trained["norm"], trained["norm_error"], label=name, **style)
        control = result["random"][name]
        left.plot(control["lengths"], control["norm"], color=COLOURS[name], linestyle=":", linewidth=1.2)
        rows = trained["layers"]
        places = [i / max(1, len(rows) - 1) for i in range(len(rows))]
        right.errorbar(places, [r["slope"] for r in rows], [r["slope_error"] for r in rows], label=name, **style)
    longest = max((m["lengths"] for m in result["models"].values()), key=len)
    left.plot(longest, [1 / length for length in longest], color="black", linestyle="--", linewidth=1, label="1/L")
    left.set(xscale="log", yscale="log", xlabel="length L (dotted: random weights)", ylabel="norm of the Jacobian")
    right.axhline(-1, color="black", linestyle="--", linewidth=1)
    right.axhline(0, color="grey", linewidth=0.6)
    right.set(xlabel="depth (first layer 0, last 1)", ylabel="slope, mean of a layer's heads", ylim=(-1.15, None))
    left.legend(fontsize=7)
