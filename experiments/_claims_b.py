"""The claims of "Leaner Transformers: More Heads, Less Depth" (arXiv 2505.20802), and the rule for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments._judge import (
    AGAINST,
    CONFIRMED,
    CONSISTENT,
    INCONCLUSIVE,
    PARTLY,
    REFUTED,
    SHOWN,
    TABLE,
    TEXT,
    Claim,
    Contest,
    Found,
    Judged,
    Results,
    Strip,
    at_edge,
    at_majority,
    decide,
    edges_of,
    hardly_learned,
    hours,
    outcomes,
    paired,
    reasons,
    sampled,
    seeds_needed,
    seeds_of,
    settled_by,
    short_of_tokens,
    strip_of,
)
from experiments._points import mean

CLOSE, FAR = 0.02, 16  # of the formula; D over N
FLOOR = 1e6  # condition numbers above it are rounding, of results that were computed in float32
FALLS = math.log(1.1)  # per doubling of heads
ACCURACY = 0.005  # of 1
FAR_LESS = 2.0  # times: what "helps far less" means
POINTS = 2.0  # of a GLUE average
NATS = 0.01  # per token
LISTS = 0.01  # of accuracy
PRETRAINED, DECODED = 60e6, 100e6  # tokens after which models of these sizes have learned something
LEAST, MOST = 29, 53  # percent of parameters saved
NO_LINK = 0.02  # a correlation below it is none
NO_TEXT_VOCABULARY = 4096  # of results that do not say theirs


def b1(found: Found, _: Results) -> Judged:
    """Whether every doubling of heads lowers the number, and whether it is near the formula far from D = N."""
    far = [row for row in found["rows"] if row["ratio"] >= FAR]
    close = [
        Contest("", -abs(row["off"]), row["standard_error"] / row["formula"], math.inf, CLOSE, True) for row in far
    ]
    pairs = [(a, b) for a, b in zip(found["rows"], found["rows"][1:], strict=False) if a["tokens"] == b["tokens"]]
    falls = [
        Contest("", a["mean"] - b["mean"], math.hypot(a["standard_error"], b["standard_error"]), math.inf, 0.0)
        for a, b in pairs
    ]
    near, down = outcomes(close), outcomes(falls)
    parts = {"falls with every doubling": decide(falls), f"within {CLOSE:.0%} of the formula": decide(close)}
    if AGAINST in near:
        parts[f"within {CLOSE:.0%} of the formula"] = REFUTED
    worst = max(far, key=lambda row: abs(row["off"]))
    off, error = worst["off"], 1.96 * worst["standard_error"] / worst["formula"]
    best = min(row["mean"] for row in found["rows"])
    number = f"at worst {off:+.1%} [{off - error:+.1%}, {off + error:+.1%}] from the formula where D >= {FAR} N"
    why = (
        f"{down.count(SHOWN)} of {len(down)} doublings lower the number, {down.count(AGAINST)} raise it; the lowest is "
        f"{best:.2f}. Within {CLOSE:.0%} of the formula: {near.count(SHOWN)} of {len(near)} points, further off: "
        f"{near.count(AGAINST)} (few tokens: the formula is one of large numbers). The theorem adds columns; heads "
        "that "
        "share a fixed width add none."
    )
    first, second = parts.values()
    verdict = (
        second if first == second else first if first != CONFIRMED else PARTLY if second == REFUTED else INCONCLUSIVE
    )
    return Judged(verdict, number, Strip(off, off - error, off + error, -CLOSE), why, parts, "more draws")


def slopes(rows: Sequence[Mapping[str, Any]], when: str, floor: float = FLOOR) -> tuple[list[float], list[int]]:
    """Per seed: the fall of the logarithm of the number per doubling of heads; the heads whose number can be told."""
    numbers = {row["heads"]: np.log(row[when]).mean(1) for row in rows if when in row}
    able = {heads: values for heads, values in numbers.items() if values.max() < math.log(floor)}
    if len(able) < 2:
        return [], sorted(able)
    table = np.stack(list(able.values()))  # (heads, seeds)
    return (-np.polyfit(np.log2(list(able)), table, 1)[0]).tolist(), sorted(able)


def b2(found: Found, _: Results) -> Judged:
    """Heads that share a fixed width, before training and after; numbers that are rounding are left out."""
    contests, left, floor = [], 0, float(found.get("floor", FLOOR))
    for when, label in (("start", "before training"), ("after", "after training")):
        rows = found["split"]
        gains, heads = slopes(rows, when, floor)
        left += len(rows) - len(heads)
        edges = [edge for row in rows if (edge := _lowest(row))] if when == "after" else []
        failed = sorted(set(edges)) if gains else ["fewer than two numbers above rounding"]
        contests.append(sampled(f"{label}, fall of ln(number) per doubling", gains or [0.0], FALLS, failed=failed))
    before, after = ([c] for c in contests)
    parts = {"before training": decide(before), "after training": decide(after)}
    verdict = decide(contests)
    if verdict == INCONCLUSIVE and parts["before training"] == CONFIRMED:
        verdict = PARTLY  # the condition is known: it was shown before training
    factor = [math.exp(value) for value in contests[0].interval]
    number = f"{factor[0]:.2f} [{factor[1]:.2f}, {factor[2]:.2f}] times lower per doubling of heads, before training"
    why = f"{reasons(contests, 2)} {left} numbers above {floor:.0e} are rounding and left out."
    settle = settled_by(contests, *["measure in float64"] * (floor <= FLOOR))
    return Judged(verdict, number, strip_of(contests[0]), why, parts, settle)


def _lowest(row: Mapping[str, Any]) -> str | None:
    """B2's first results kept no table of rates; 0.001 was the lowest of two."""
    return at_edge(row) if row.get("rates") else f"best learning rate {row['rate']:g}, one of two tried"


def doublings(cells: Mapping[str, Mapping[str, Any]], field: str, deep: int) -> tuple[list[float], list[str]]:
    """Per seed: accuracy gained per doubling of heads or MLP width on the balanced part of a grid; cells used."""
    kept = {name: c for name, c in cells.items() if c["depth"] < deep and c.get("way", "split") == "split"}
    heads, mlps = ({int(c[key]) for c in kept.values()} for key in ("heads", "mlp"))
    place = {(c["depth"], c["heads"], c["mlp"]): name for name, c in kept.items()}
    ends = (min(heads), max(heads)), (min(mlps), max(mlps))
    full = [d for d in {c["depth"] for c in kept.values()} if all((d, h, m) in place for h in ends[0] for m in ends[1])]
    low, high = ends[field == "mlp"]
    if not full or low == high:
        return [], []
    gains, used = [], []
    for depth in full:
        for other in ends[field != "mlp"]:
            a, b = ((depth, x, other) if field == "heads" else (depth, other, x) for x in (low, high))
            used += [place[a], place[b]]
            gains.append((np.array(kept[place[b]]["accuracy"]) - kept[place[a]]["accuracy"]) / math.log2(high / low))
    return np.mean(gains, axis=0).tolist(), sorted(set(used))


def b3(found: Found, _: Results) -> Judged:
    """8 layers of 12 heads against 12 layers, both readings of more heads, and heads against the MLP."""
    cells, first = found["cells"], found["original"]
    base, contests = cells[first], []
    for way in ("split", "grown"):
        name = next(
            (n for n, c in cells.items() if c["depth"] * 3 == base["depth"] * 2 and c["heads"] >= 4 * base["heads"]
             and c["mlp"] == base["mlp"] and c.get("way", "split") == way), None,
        )  # fmt: skip
        what = f"8 layers of 12 heads ({way}) against 12 of 3"
        if name is None:
            contests.append(Contest(what, 0.0, math.inf, 1, ACCURACY, failed=("not trained",)))
        else:
            contests.append(
                paired(what, cells[name]["accuracy"], base["accuracy"], ACCURACY, failed=edges_of(cells, first, name))
            )
    (heads, used), (mlp, more) = (doublings(cells, field, base["depth"]) for field in ("heads", "mlp"))
    what = f"a doubling of heads beyond {FAR_LESS:g} times that of the MLP"
    if heads and mlp:
        gains = (np.array(heads) - FAR_LESS * np.array(mlp)).tolist()
        contests.append(sampled(what, gains, ACCURACY, failed=edges_of(cells, *used, *more)))
    else:
        contests.append(Contest(what, 0.0, math.inf, 1, ACCURACY, failed=("no balanced grid",)))
    told = (
        f" A doubling of heads gains {mean(heads).signed(4)}, of the MLP {mean(mlp).signed(4)}."
        if heads and mlp
        else ""
    )
    number = f"8 layers of 12 heads against 12 of 3: {contests[0].interval.signed(4)} of accuracy"
    why = (
        f"{reasons(contests, 4)}{told} {found['images']:,} images seen, accuracy {mean(base['accuracy']).mean:.0%}: "
        "far from "
        "trained out."
    )
    seeds = max(seeds_of(contests), seeds_needed(contests))
    settle = f"{settled_by(contests)}; what is trained here, so often: {hours(cells, list(cells), seeds)}"
    return Judged(decide(contests), number, strip_of(contests[0]), why, settle=settle)


def b4(found: Found, _: Results) -> Judged:
    """Counting: originals, redesigns, and two other readings of what was changed."""
    from experiments.b4_redesigns import readings

    known = [row for row in found["rows"] if row["paper"]["after"] is not None]
    off = [row["title"] for row in known if round(row["millions"]["before"], 1) != row["paper"]["before"]]
    told, outside = [], []
    for row in known:
        counts = {"as written": row["millions"]["after"], **readings(row)}
        way = min(counts, key=lambda each: abs(counts[each] - row["paper"]["after"]))
        told.append(f"{row['title']} {counts[way]:.1f} against {row['paper']['after']:.1f} ({way})")
        saving = round(100 * (1 - counts[way] / row["millions"]["before"]))
        outside += [row["title"]] * (not LEAST <= saving <= MOST)
    exact = sum(round(row["millions"]["after"], 1) == row["paper"]["after"] for row in known)
    able = len(known) - len(outside)
    number = f"{exact} of {len(known)} counts agree as written, {able} within {LEAST}-{MOST}% by some reading"
    why = (
        f"Millions of parameters: {'; '.join(told)}. So more heads sometimes means wider attention, and one more row "
        "halves "
        "an MLP."
    )
    verdict = INCONCLUSIVE if off else REFUTED if outside else CONSISTENT
    parts = {"parameters": verdict, "at the same accuracy": "not tested"}
    strip = Strip(*[exact / max(1, len(known))] * 3)
    return Judged(verdict, number, strip, why, parts, f"originals that agree: {', '.join(off)}")


def b5(found: Found, _: Results) -> Judged:
    """GLUE averages, with the checks on masked loss, on every task and on rates."""
    from experiments.b5_encoders import average

    models = found["models"]
    deep, lean = models["deep"], models["lean"]
    failed = hardly_learned(deep["masked_loss"], math.log(found.get("vocabulary", NO_TEXT_VOCABULARY)))
    for task, score in deep["glue"].items():
        kind = {"CoLA": "matthews", "STS-B": "spearman"}.get(task)
        if kind is not None:
            failed += [f"{task} at {mean(score[kind]).mean:.2f}"] * (abs(mean(score[kind]).mean) < NO_LINK)
        else:
            failed += at_majority(score["accuracy"], score.get("majority", 0.5), task)
    failed += edges_of(models, "deep", "lean")
    contest = paired("lean against deep", average(lean), average(deep), POINTS, True, failed)
    number = f"lean against deep {contest.interval.signed(1)} points of the GLUE average"
    seeds, times = max(seeds_of([contest]), seeds_needed([contest])), PRETRAINED / found.get("tokens", PRETRAINED)
    settle = settled_by([contest], f"pretrain on {PRETRAINED / 1e6:.0f}M tokens", "use tasks that such models learn")
    settle += f"; pretraining both: {hours(models, ('deep', 'lean'), seeds, times)}"
    return Judged(decide([contest]), number, strip_of(contest), reasons([contest], 1), settle=settle)


def b6(found: Found, _: Results) -> Judged:
    """Held-out loss at equal tokens: the claim's pair, and the paper's own size where it was trained."""
    models, contests = found["models"], []
    nothing = math.log(found.get("vocabulary", NO_TEXT_VOCABULARY))
    for deep, lean in (("deep", "lean"), ("paper's deep", "paper's lean")):
        if not {deep, lean} <= set(models):
            continue
        failed = short_of_tokens(found["tokens"], models[deep]["parameters"])
        failed += hardly_learned(models[deep]["loss"], nothing) + edges_of(models, deep, lean)
        what = f"{lean} below {deep} at equal tokens"
        contests.append(paired(what, models[deep]["loss"], models[lean]["loss"], NATS, failed=failed))
    loss = contests[0].interval
    turned = loss._replace(mean=-loss.mean, low=-loss.high, high=-loss.low)
    number = f"lean against deep {turned.signed()} nats at equal tokens (lower is better)"
    extra = []
    for one, other, words in (
        ("lean, equal FLOPs", "deep", "at equal FLOPs, with more tokens,"),
        ("lean", "lean, 12 heads", "16 heads against 12 in 4 layers"),
        ("deep, 16 heads", "deep", "16 heads against 12 in 12 layers"),
    ):
        if {one, other} <= set(models):
            extra.append(
                f"{words} {mean(np.subtract(models[one]['loss'], models[other]['loss']).tolist()).signed()} nats"
            )
    why = f"{reasons(contests, 3, ' nats')} Beside the claim: {'; '.join(extra) or 'nothing'}."
    seeds, times = max(seeds_of(contests), seeds_needed(contests)), DECODED / found["tokens"]
    more = ["train the paper's pair of 89M parameters too"] * (len(contests) < 2)
    settle = settled_by(contests, f"train on {DECODED / 1e6:.0f}M tokens", *more)
    settle += f"; the smaller pair: {hours(models, ('deep', 'lean'), seeds, times)}"
    return Judged(decide(contests), number, Strip(*turned), why, settle=settle)


def b7(found: Found, _: Results) -> Judged:
    """One layer of 4 and of 8 heads against two layers, and 8 heads against 2."""
    models, contests = found["models"], []
    for one, other, what in (
        ("1 x 4", "2 x 2", "1 layer of 4 heads against 2 layers of 2"),
        ("1 x 8", "2 x 2", "1 layer of 8 heads against 2 layers of 2"),
        ("1 x 8", "1 x 2", "8 heads against 2 in 1 layer"),
    ):
        if not {one, other} <= set(models):
            contests.append(Contest(what, 0.0, math.inf, 1, LISTS, failed=("not trained",)))
            continue
        a, b = models[one], models[other]
        failed = at_majority(b["accuracy"], found["chance"], "ListOps") + edges_of(models, one, other)
        contests.append(paired(what, a["accuracy"], b["accuracy"], LISTS, failed=failed))
    number = f"{contests[0].what} {contests[0].interval.signed()} of accuracy"
    standing = outcomes([contest._replace(failed=()) for contest in contests]).count(SHOWN)
    why = f"{reasons(contests)} Leaving checks aside, {standing} of {len(contests)} stand after Holm's correction."
    names, seeds = ("1 x 2", "1 x 4", "1 x 8", "2 x 2"), max(seeds_of(contests), seeds_needed(contests))
    settle = f"{settled_by(contests)}; {hours(models, names, seeds)}"
    return Judged(decide(contests), number, strip_of(contests[0]), why, settle=settle)


CLAIMS = {
    "b1_gaussian": Claim(
        "More heads bring the condition number of the concatenated head outputs towards 1 (Gaussian case).",
        f"{TEXT} (Theorem 3.2)",
        f"Every doubling of heads lowers it, and it is within {CLOSE:.0%} of the formula wherever D >= {FAR} N. If the "
        "first holds and the second does not: with conditions.",
        b1,
    ),
    "b2_conditioning": Claim(
        "In ViT-B the condition number of attention layers falls as heads are added.",
        f"{TEXT} and {TABLE}",
        "At a fixed width it falls by 10% or more per doubling of heads, before and after training; numbers that are "
        "rounding are left out. Shown before training alone: with conditions.",
        b2,
    ),
    "b3_grid": Claim(
        "A ViT of 8 layers with 12 or more heads beats the 12-layer original; widening the MLP helps far less.",
        TABLE,
        f"8 layers of 12 heads gain {ACCURACY} of accuracy or more, with heads that split the width and with heads "
        "that "
        f"widen attention, and a doubling of heads gains {FAR_LESS:g} times what a doubling of the MLP gains.",
        b3,
    ),
    "b4_redesigns": Claim(
        "Redesigned with more heads and fewer layers, architectures have 29-53% fewer parameters at the same accuracy.",
        f"{TEXT} and {TABLE}",
        "Arithmetic: consistent if originals agree and every saving is in the range by a reading that is named; "
        "accuracy is not tested, which takes ImageNet.",
        b4,
    ),
    "b5_encoders": Claim(
        "Crammed BERT with 10 layers of 24 heads instead of 16 of 12 keeps its GLUE average with 29% fewer parameters.",
        TABLE,
        f"The lean encoder loses at most {POINTS:g} points; void while the masked loss is near knowing nothing, a "
        "task is "
        "at its majority class, or a best learning rate is at an edge.",
        b5,
    ),
    "b6_decoders": Claim(
        "A GPT-2 with 4 layers of 16 heads reaches a better validation loss than one with 12 layers of 12 heads.",
        TABLE,
        f"At equal tokens, by {NATS} nats or more; void with fewer training tokens than parameters or a best learning "
        "rate at an edge. More tokens for the lean model are no part of the claim.",
        b6,
    ),
    "b7_listops": Claim(
        "One layer with 4 or more heads beats two layers; accuracy on ListOps rises as heads go from 2 to 8.",
        TABLE,
        f"All three comparisons are shown, margin {LISTS} of accuracy; void at the majority class or with a best "
        "learning rate at an edge.",
        b7,
    ),
}
