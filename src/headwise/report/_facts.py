"""What the report says in words: sentences and numbers that the page and the model card share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from headwise.cost import kv_bytes_per_token, parameters
from headwise.report import _judged as judged
from headwise.report._bits import is_coded, plan_in_bits
from headwise.report._commands import how_to_make
from headwise.report._rivals import rivals
from headwise.report._text import as_number, human, interval, listing, number, relative
from headwise.runs.dossier import Dossier
from headwise.types import DAMAGE, BeforeAfter, Measure, ModelShape

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
CACHE, SIZE = "KV cache per token", "Parameters"
STAGES = {  # what a dossier may lack -> what to say, and the stage that makes it
    "readings": ("The model has not been probed", "probe"),
    "plan": ("No plan has been made", "allocate"),
    "healing": ("The model was not healed", "heal"),
    "verdict": ("Nothing has been verified", "verify"),
}


class Fact(NamedTuple):
    """One quantity before and after, with the interval of `after` where one is known."""

    label: str
    unit: str = ""
    before: float | None = None
    after: float | None = None
    low: float | None = None
    high: float | None = None
    planned: bool = False  # from the formulas, not yet counted on the real object
    range: str = "95% interval"  # what low and high are

    @property
    def interval(self) -> str:
        """The interval in words, or nothing."""
        return "" if self.low is None or self.high is None else interval(self.low, self.high)


def absent(dossier: Dossier, *needed: str) -> tuple[str, str] | None:
    """What to say and what to type where a stage that is needed has not run; None where all have."""
    for stage in needed:
        if getattr(dossier, stage) is None:
            words, makes = STAGES[stage]
            why = dossier.unverified if stage == "verdict" else None
            return f"{_sentence(why)}. {words}" if why else words, how_to_make(dossier, makes)
    return None


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def model_name(dossier: Dossier) -> str:
    """What the run calls its model."""
    known = dossier.plan or dossier.readings or dossier.settings
    return known.model if known else "the model"


def settings_of(dossier: Dossier) -> dict[str, Any]:
    """The run's settings by name, for the commands that make it again."""
    return dossier.settings.to_json() if dossier.settings else {}


def is_portable(dossier: Dossier) -> bool:
    """Whether the result is an ordinary architecture: as planned, or as the settings ask where there is no plan."""
    known = dossier.plan or dossier.settings
    return bool(known and known.portable)


def damage_unit(dossier: Dossier) -> str:
    """What damage is counted in, which says what the model is for."""
    curves = dossier.readings.curves if dossier.readings else ()
    return next((curve.unit for curve in curves if curve.kind.startswith(DAMAGE)), NATS)


def use(dossier: Dossier) -> tuple[str, str]:
    """Auto class and tag of a model of this kind."""
    return USES.get(damage_unit(dossier), USES[NATS])


def reads_images(dossier: Dossier) -> bool:
    """Whether the model reads images, not text."""
    return damage_unit(dossier).endswith("per image")


def measures(dossier: Dossier) -> tuple[Fact, ...]:
    """The numbers that answer most questions: perplexity or its like, cache where there is one, parameters, time."""
    quality, speed = (dossier.verdict.quality, dossier.verdict.speed) if dossier.verdict else ({}, {})
    decode = "decode_ms_per_token" in speed or not speed
    key, phase = ("decode_ms_per_token", "generating") if decode else ("prefill_ms_per_token", "reading")
    time = _fact(f"Time per token, {phase}", speed.get(key), "ms")
    if reads_images(dossier):
        time = _fact("Time per image", speed.get("ms_per_image"), "ms")
    right = [_fact("Accuracy", quality["accuracy"])] if "accuracy" in quality else []
    cache = _size(dossier, CACHE, "bytes", "kv_bytes_per_token", kv_bytes_per_token)
    return (
        *right,
        _quality(quality, damage_unit(dossier)),
        *([cache] if dossier.plan is None or dossier.plan.source.cached else []),
        _size(dossier, SIZE, "", "parameters", parameters),
        time._replace(range="range of repeats"),
    )


def _quality(quality: dict[str, BeforeAfter], unit: str) -> Fact:
    """Perplexity, or the best that the task has in its place."""
    compared = {"cosine": "Cosine to the source", "kl": "KL to the source"}
    if not quality and unit.endswith(("cosine", "text", "image")):  # not measured yet
        return Fact(compared["cosine" if "cosine" in unit else "kl"])
    if "loss" not in quality and "perplexity" not in quality:
        for key, label in compared.items():
            if key in quality:
                return _fact(label, quality[key])
    masked = "loss" in quality and "perplexity" not in quality
    return _fact("Loss", quality["loss"], "nats") if masked else _fact("Perplexity", quality.get("perplexity"))


def _fact(label: str, both: BeforeAfter | None, unit: str = "") -> Fact:
    before, after = (both.before, both.after) if both else (None, None)
    ends = (as_number(after.low), as_number(after.high)) if after else (None, None)
    return Fact(label, unit, _value(before), _value(after), *ends)


def _value(measure: Measure | None) -> float | None:
    return as_number(measure.value) if measure else None


def _size(dossier: Dossier, label: str, unit: str, key: str, formula: Callable[[ModelShape], float]) -> Fact:
    counted = _fact(label, dossier.verdict.size.get(key) if dossier.verdict else None, unit)
    if counted.after is not None or dossier.plan is None:
        return counted
    return Fact(label, unit, formula(dossier.plan.source), formula(dossier.plan.target), planned=True)


def headline(dossier: Dossier) -> str:
    """The answer in one sentence: what shrank, what it cost, whether it holds."""
    name = model_name(dossier)
    if dossier.plan is None and dossier.verdict is None:
        done = "has been probed; no plan has been made" if dossier.readings else "has not been probed"
        return f"{name} {done} yet."
    found = measures(dossier)
    first, sizes = found[0], [fact for fact in found if fact.label in (CACHE, SIZE)]
    verb = "will need" if all(size.planned for size in sizes) else "now needs"
    fewer = {CACHE: ("less KV cache", " bytes per token"), SIZE: ("fewer parameters", "")}
    shrunk = [_shrunk(size, *fewer[size.label]) for size in sizes]
    same = "as much cache and as many parameters as before" if len(sizes) > 1 else "as many parameters as before"
    sentence = f"{name} {verb} " + (listing([part for part in shrunk if part]) or same)
    if dossier.verdict is None:
        why = f" ({dossier.unverified})" if dossier.unverified else ""
        return f"{sentence}; what that costs in quality has not been measured yet{why}."
    cost = "" if first.label == "Perplexity" else f"; {_cost(first)}"  # perplexity is given by length
    return f"{sentence}{cost}. {judged.headline(dossier.verdict)}"


def _shrunk(fact: Fact, what: str, unit: str) -> str:
    if fact.before is None or fact.after is None or fact.after >= fact.before:
        return ""
    less = relative(fact.before, fact.after).lstrip("−")
    return f"{less} {what} ({human(fact.before)} → {human(fact.after)}{unit})"


def _cost(fact: Fact) -> str:
    what = fact.label if fact.label.startswith("KL") else fact.label[:1].lower() + fact.label[1:]
    if fact.after is None:
        return f"its {what} was not measured"
    within = f"95% interval {fact.interval}" if fact.interval else ""
    if fact.before is None:
        return f"{what} is {number(fact.after)}" + (f" ({within})" if within else "")
    change = ", ".join(filter(None, (relative(fact.before, fact.after), within)))
    return f"{what} went from {number(fact.before)} to {number(fact.after)} ({change})"


def way_out(dossier: Dossier) -> str:
    """Tailored or portable, what that means for loading, and what the other would have predicted."""
    text = "Tailored: every layer has its own sizes, so loading takes headwise, or trust_remote_code=True without it."
    if is_portable(dossier):
        text = "Portable: every layer has the same sizes, so stock transformers loads the folder with no custom code."
    coded = dossier.plan if is_coded(dossier.plan) else None
    if dossier.plan is not None and (most := max(layer.pooled for layer in dossier.plan.source.layers)) > 1:
        text += f" Rows of the cache are shared by {most} key/value heads each"
        text += "." if coded else ": dimensions of heads are those of a row."
    text += f" The cache is coded in bits: {plan_in_bits(coded)}." if coded else ""
    others = [row for row in rivals(dossier) if not row.chosen and row.predicted is not None]
    rival = next((row for row in others if (row.strategy == "portable") != is_portable(dossier)), None)
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


def damages(dossier: Dossier) -> dict[str, Measure]:
    """The whole plan's damage: as the sum of its prices, as rehearsed on calibration text, as measured."""
    known = dossier.verdict.damage if dossier.verdict else {}
    planned = Measure(dossier.plan.predicted_damage) if dossier.plan else None
    found = {
        "sum of prices": known.get("sum_of_prices", planned),
        "rehearsed": known.get("predicted") if "sum_of_prices" in known else None,
        "measured": known.get("measured"),
    }
    return {name: measure for name, measure in found.items() if measure and as_number(measure.value) is not None}


def damage_in_words(dossier: Dossier) -> str:
    """Predicted against measured damage, and whether the prediction held."""
    if dossier.verdict is None:
        return ""
    known, unit = dossier.verdict.damage, damage_unit(dossier)
    found, predicted = known.get("measured"), _value(known.get("predicted"))
    measured = _value(found)
    if predicted is None and dossier.plan:
        predicted = dossier.plan.predicted_damage
    if predicted is None or measured is None or found is None:
        values = {"predicted": predicted, "measured": measured}
        words = [f"{word} {number(value)} {unit}" for word, value in values.items() if value is not None]
        return f"Damage: {words[0]}; there is nothing to compare it with." if words else ""
    text = f"The plan predicted a damage of {number(predicted)} {unit}; {number(measured)} was measured"
    low, high = as_number(found.low), as_number(found.high)
    if low is not None and high is not None:
        inside = "inside" if low <= predicted <= high else "outside"
        text += f" (95% interval {interval(low, high)}; the prediction lies {inside} it)"
    if predicted > 0 and measured > 0:
        text += f", {measured / predicted:.2g} times the prediction"
    better = dossier.healing and measured < predicted
    healed = " The prediction leaves healing out, which may be part of the difference." if better else ""
    return f"{text}.{healed}"
