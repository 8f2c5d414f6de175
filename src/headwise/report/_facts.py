"""What the report says in words and tables: plain values that the page and the model card share."""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.cost import kv_bytes_per_token, parameters
from headwise.report import _judged as judged
from headwise.report._rivals import comparisons, priced
from headwise.report._text import MISSING, as_number, human, listing, number, relative, words
from headwise.types import Dossier

Rows = tuple[tuple[str, ...], ...]
NATS = "nats per token"
USES = {  # unit of damage -> Auto class and tag of the models whose damage is counted so
    NATS: ("AutoModelForCausalLM", "text-generation"),
    "nats per masked token": ("AutoModelForMaskedLM", "fill-mask"),
    "1 - cosine": ("AutoModel", "sentence-similarity"),
    "nats per text": ("AutoModelForSequenceClassification", "text-classification"),
    "nats per image": ("AutoModelForImageClassification", "image-classification"),
    "1 - cosine per image": ("AutoModel", "image-feature-extraction"),
    "nats per target token": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "nats per transcript token": ("AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
}


class Measure(NamedTuple):
    """One quantity before and after, with the interval of `after` where one is known."""

    label: str
    unit: str
    before: float | None
    after: float | None
    low: float | None = None
    high: float | None = None
    planned: bool = False  # from the formulas, not yet seen on the real object
    range: str = "95% interval"  # what low and high are

    @property
    def interval(self) -> str:
        """The interval in words, or nothing."""
        return "" if self.low is None or self.high is None else f"{number(self.low)} to {number(self.high)}"


def model_name(dossier: Dossier) -> str:
    """What the run calls its model."""
    for part in (dossier.plan, dossier.readings):
        if part is not None:
            return part.model
    return str(dossier.settings.get("model") or "the model")


def is_portable(dossier: Dossier) -> bool:
    """Whether the result is an ordinary architecture: as planned, or as asked for where there is no plan yet."""
    return dossier.plan.portable if dossier.plan else bool(dossier.settings.get("portable"))


def damage_unit(dossier: Dossier) -> str:
    """What damage is counted in, which says what the model is for."""
    curves = dossier.readings.curves if dossier.readings else ()
    return next((curve.unit for curve in curves if curve.kind.startswith("damage.")), NATS)


def use(dossier: Dossier) -> tuple[str, str]:
    """Auto class and tag of a model of this kind."""
    return USES.get(damage_unit(dossier), USES[NATS])


def reads_images(dossier: Dossier) -> bool:
    """Whether the model reads images, not text."""
    return damage_unit(dossier).endswith("per image")


def measures(dossier: Dossier) -> tuple[Measure, ...]:
    """The numbers that answer most questions: perplexity or its like, cache where there is one, parameters, time."""
    quality, speed = (dossier.verdict.quality, dossier.verdict.speed) if dossier.verdict else ({}, {})
    decode = any(key.startswith("decode_ms_per_token") for key in speed) or not speed
    key, phase = ("decode_ms_per_token", "generating") if decode else ("prefill_ms_per_token", "reading")
    time = _pair(f"Time per token, {phase}", "ms", speed, key)
    if reads_images(dossier):
        time = _pair("Time per image", "ms", speed, "ms_per_image")
    right = [_pair("Accuracy", "", quality, "accuracy")] if "accuracy_after" in quality else []
    cache = _size(dossier, CACHE, "bytes", "kv_bytes_per_token", kv_bytes_per_token)
    return (
        *right,
        _quality(quality, damage_unit(dossier)),
        *([cache] if dossier.plan is None or dossier.plan.source.cached else []),
        _size(dossier, SIZE, "", "parameters", parameters),
        time._replace(range="range of repeats"),
    )


CACHE, SIZE = "KV cache per token", "Parameters"


def _quality(quality: Any, unit: str) -> Measure:
    """Perplexity, or the best that the task has in its place."""
    for key, label in (("cosine", "Cosine to the source"), ("kl", "KL to the source")):
        if not quality and unit.endswith(("cosine", "text", "image")) and (key == "kl" or "cosine" in unit):
            return Measure(label, "", None, None)  # not measured yet
        if key in quality and "loss_after" not in quality and "perplexity_after" not in quality:
            mean, low, high = (as_number(quality.get(name)) for name in (key, f"{key}_low", f"{key}_high"))
            return Measure(label, "", None, mean, low, high)
    masked = "loss_after" in quality and "perplexity_after" not in quality
    return _pair("Loss", "nats", quality, "loss") if masked else _pair("Perplexity", "", quality, "perplexity")


def _pair(label: str, unit: str, values: Any, key: str) -> Measure:
    before, after = as_number(values.get(f"{key}_before")), as_number(values.get(f"{key}_after"))
    low, high = as_number(values.get(f"{key}_after_low")), as_number(values.get(f"{key}_after_high"))
    return Measure(label, unit, before, after, low, high)


def _size(dossier: Dossier, label: str, unit: str, key: str, formula: Any) -> Measure:
    counted = _pair(label, unit, dossier.verdict.size if dossier.verdict else {}, key)
    if counted.after is not None or dossier.plan is None:
        return counted
    return Measure(label, unit, formula(dossier.plan.source), formula(dossier.plan.target), planned=True)


def headline(dossier: Dossier) -> str:
    """The answer in one sentence: what shrank, what it cost, whether it holds."""
    name = model_name(dossier)
    if dossier.plan is None and dossier.verdict is None:
        done = "has been probed; no plan has been made" if dossier.readings else "has not been probed"
        return f"{name} {done} yet."
    found = measures(dossier)
    first, sizes = found[0], [measure for measure in found if measure.label in (CACHE, SIZE)]
    verb = "will need" if all(size.planned for size in sizes) else "now needs"
    fewer = {CACHE: ("less KV cache", " bytes per token"), SIZE: ("fewer parameters", "")}
    shrunk = [_shrunk(size, *fewer[size.label]) for size in sizes]
    same = "as much cache and as many parameters as before" if len(sizes) > 1 else "as many parameters as before"
    sentence = f"{name} {verb} " + (listing([part for part in shrunk if part]) or same)
    if dossier.verdict is None:
        why = f" ({dossier.unverified})" if dossier.unverified else ""
        return f"{sentence}; what that costs in quality has not been measured yet{why}."
    cost = "" if first.label == "Perplexity" else f"; {_cost(first)}"  # perplexity is told by length
    return f"{sentence}{cost}. {judged.headline(dossier.verdict)}"


def why_no_verdict(dossier: Dossier) -> str:
    """Why a verdict that was made does not count any more, in a sentence; empty where there was none."""
    why = dossier.unverified or ""
    return f"{why[:1].upper()}{why[1:]}." if why else ""


def _shrunk(measure: Measure, what: str, unit: str) -> str:
    if measure.before is None or measure.after is None or measure.after >= measure.before:
        return ""
    less = relative(measure.before, measure.after).lstrip("−")
    return f"{less} {what} ({human(measure.before)} → {human(measure.after)}{unit})"


def _cost(measure: Measure) -> str:
    what = measure.label[:1].lower() + measure.label[1:] if measure.label[:2] != "KL" else measure.label
    if measure.after is None:
        return f"its {what} was not measured"
    if measure.before is None:
        return f"{what} is {number(measure.after)}" + (
            f" (95% interval {measure.interval})" if measure.interval else ""
        )
    interval = f", 95% interval {measure.interval}" if measure.interval else ""
    change = relative(measure.before, measure.after)
    return f"{what} went from {number(measure.before)} to {number(measure.after)} ({change}{interval})"


def way_out(dossier: Dossier) -> str:
    """Tailored or portable, what that means for loading, and what the other would have predicted."""
    if is_portable(dossier):
        text = "Portable: every layer has the same sizes, so stock transformers loads the folder with no custom code."
    else:
        text = (
            "Tailored: every layer has its own sizes, so loading takes headwise, or trust_remote_code=True without it."
        )
    if dossier.plan is not None and (most := max(layer.pooled for layer in dossier.plan.source.layers)) > 1:
        text += f" Rows of the cache are shared by {most} key/value heads each: dimensions of heads are those of a row."
    rivals = [row for row in comparisons(dossier) if not row.chosen and row.predicted is not None]
    rival = next((row for row in rivals if (row.strategy == "portable") != is_portable(dossier)), None)
    if rival is None or dossier.plan is None:
        return text
    ours, theirs = number(dossier.plan.predicted_damage), number(rival.predicted)
    return f"{text} Predicted damage is {ours} {damage_unit(dossier)}; the {rival.strategy} plan predicts {theirs}."


def loading(dossier: Dossier, folder: str = "folder") -> str:
    """Python that loads the result."""
    auto = use(dossier)[0]
    stock = f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained"
    if is_portable(dossier):
        return f'{stock}("{folder}")'
    ours = f'import headwise\n\nmodel = headwise.load("{folder}")'
    return f'{ours}\n\n# or, without headwise:\n{stock}("{folder}", trust_remote_code=True)'


def budget_rows(dossier: Dossier) -> Rows:
    """Budget, before, limit, spent, share of the source, whether it is met: as planned, or as checked if it was."""
    if dossier.plan is None:
        return ()
    rows, checks = [], {check.name: check.passed for check in (dossier.verdict.checks if dossier.verdict else ())}
    for budget in dossier.plan.budgets:
        full, spent = priced(budget, dossier.plan.source), priced(budget, dossier.plan.target)
        spent = as_number(dossier.plan.spent.get(budget.key)) if spent is None else spent
        share = f"{spent / full:.1%}" if full and spent is not None else MISSING
        within = None if spent is None else spent <= budget.limit * (1 + 1e-9)
        within = checks.get(f"budget {budget.text}", within)
        met = MISSING if within is None else "✓ met" if within else "✗ NOT MET"
        rows.append((budget.text, budget.unit, human(full), human(budget.limit), human(spent), share, met))
    return tuple(rows)


def certificate_rows(dossier: Dossier) -> Rows:
    """Every measured quantity: name, before, after, change, interval of after. Unknown keys are shown as they come."""
    if dossier.verdict is None:
        return ()
    rows: list[tuple[str, ...]] = []
    for table in (dossier.verdict.quality, dossier.verdict.size, dossier.verdict.speed):
        for stem, ends in _stems(table).items():
            if "" in ends:
                before, after, low, high = None, ends[""], ends.get("low"), ends.get("high")
            else:
                before, after, low, high = (ends.get(e) for e in ("before", "after", "after_low", "after_high"))
            interval = f"{number(low)} to {number(high)}" if low is not None and high is not None else MISSING
            rows.append((words(stem), number(before), number(after), relative(before, after), interval))
    return tuple(rows)


ENDS = ("after_low", "after_high", "before_low", "before_high", "before", "after", "low", "high", "")


def _stems(table: Any) -> dict[str, dict[str, float | None]]:
    """`x_before, x_after, x_after_low` grouped under `x`; `kl, kl_low` under `kl` with the empty end."""
    stems: dict[str, dict[str, float | None]] = {}
    for key, value in table.items():
        for end in ENDS:
            if not end or key.endswith(f"_{end}"):
                stem = key[: -len(end) - 1] if end else key
                stems.setdefault(stem, {})[end] = as_number(value)
                break
    return stems


def damage_in_words(dossier: Dossier) -> str:
    """Predicted against measured damage, and whether the prediction held."""
    if dossier.verdict is None:
        return ""
    values = dossier.verdict.damage
    predicted, measured, low, high = (
        as_number(values.get(k)) for k in ("predicted", "measured", "measured_low", "measured_high")
    )
    if predicted is None and dossier.plan:
        predicted = dossier.plan.predicted_damage
    if predicted is None or measured is None:
        known = [
            f"{word} {number(v)} {damage_unit(dossier)}"
            for word, v in (("predicted", predicted), ("measured", measured))
            if v is not None
        ]
        return f"Damage: {known[0]}; there is nothing to compare it with." if known else ""
    unit = damage_unit(dossier)
    text = f"The plan predicted a damage of {number(predicted)} {unit}; {number(measured)} was measured"
    if low is not None and high is not None:
        inside = "inside" if low <= predicted <= high else "outside"
        text += f" (95% interval {number(low)} to {number(high)}; the prediction lies {inside} it)"
    if predicted > 0 and measured > 0:
        text += f", {measured / predicted:.2g} times the prediction"
    better = dossier.healing and measured < predicted
    healed = " The prediction leaves healing out, which may be part of the difference." if better else ""
    return f"{text}.{healed}"


def provenance(dossier: Dossier) -> Rows:
    """Name and value of everything that a reader needs to judge or repeat the run."""
    rows: list[tuple[str, str]] = []
    if dossier.verdict:
        v = dossier.verdict
        rows += [
            ("Evaluation images" if reads_images(dossier) else "Evaluation data", v.evaluation),
            ("Evaluation tokens", number(v.tokens) + (" (patches)" if reads_images(dossier) else "")),
            ("Machine", v.machine),
            ("Date", v.date),
        ]
    if dossier.readings:
        rows.append(("Calibration tokens", number(dossier.readings.tokens)))
        if dossier.readings.seconds:
            rows.append(("Probing", f"{number(dossier.readings.seconds)} s"))
    if dossier.plan:
        rows += [("Strategy", dossier.plan.strategy), ("Gap to the proven bound", f"{dossier.plan.gap:.2%}")]
    for key, value in dossier.settings.items():
        if isinstance(value, dict):
            rows += [(f"{words(key)}: {inner}", str(item)) for inner, item in value.items()]
        else:
            rows.append(
                (f"Setting: {key}", ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
            )
    return tuple(rows)
