"""What the report says in words: sentences and numbers that the page and the model card share."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from headwise.budgets import of_weights
from headwise.cost import kv_bytes_per_token, parameters, weight_bytes
from headwise.report import _judged as judged
from headwise.report._bits import is_coded, plan_in_bits
from headwise.report._commands import how_to_make
from headwise.report._rivals import rivals
from headwise.report._sizes import size_of, sizes_of
from headwise.report._text import as_number, human, interval, listing, number, relative
from headwise.report._words import CALIBRATION, MEASURED, PREDICTED, WHEN, damage_numbers, known_ends
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
CACHE, SIZE, PROMPT, STORED = "KV cache per token", "Parameters", "Prompt FLOPs", "Weights as stored"
LABELS = {"kv": CACHE, "params": SIZE, "flops": PROMPT, "weights": STORED}  # of what a budget limits
LESS = {
    CACHE: ("less", "more", "KV cache"),
    SIZE: ("fewer", "more", "parameters"),
    PROMPT: ("fewer", "more", "FLOPs a prompt"),
    STORED: ("fewer", "more", "bytes of weights"),
    "Time per token, generating": ("less", "more", "time per generated token"),
    "Time per token, reading": ("less", "more", "time per token"),
    "Time per image": ("less", "more", "time per image"),
}
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
            return f"{why[:1].upper()}{why[1:]}. {words}" if why else words, how_to_make(dossier, makes)
    return None


def model_name(dossier: Dossier) -> str:
    """What the run calls its model."""
    known = dossier.plan or dossier.readings or dossier.settings
    return known.model if known else "the model"


def base_name(dossier: Dossier) -> str:
    """The last part of the model's name or path."""
    return model_name(dossier).rstrip("/").rpartition("/")[2] or "the model"


def title(dossier: Dossier) -> str:
    """The last part of the model's name or path, and what was asked of it."""
    name = base_name(dossier)
    budgets = ", ".join(budget.text for budget in dossier.plan.budgets) if dossier.plan else ""
    return f"{name} at {budgets}" if budgets else name


def elsewhere(dossier: Dossier) -> Dossier:
    """The run as those should read of it who do not have its folder."""
    return replace(dossier, folder="")


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
    packed = dossier.plan is not None and any(map(of_weights, dossier.plan.budgets))  # bytes of weights were limited
    return (
        *right,
        _quality(quality, damage_unit(dossier)),
        *([cache] if dossier.plan is None or dossier.plan.source.cached else []),
        *([_size(dossier, STORED, "bytes", "weight_bytes", weight_bytes)] if packed else []),
        _size(dossier, SIZE, "", "parameters", parameters),
        time._replace(range=f"{_plain_way(dossier)}range of repeats"),
    )


def _plain_way(dossier: Dossier) -> str:
    """What to know of times of a cache in bits: kernels for CUDA are built when they first run, and are not timed."""
    fast = dossier.verdict is not None and "optimise=True" in dossier.verdict.machine
    return "without optimise=True; " if is_coded(dossier.plan) and not fast else ""


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


def measured_words(dossier: Dossier) -> str:
    """Measured, and whether anything was healed before."""
    healing = dossier.healing
    if healing is None:
        return "measured"
    used = [stage.kept is not False for stage in healing.stages or ()]
    none = healing.method == "none" or (used and not any(used))
    return "measured, without healing" if none else "measured after healing"


def sizes(dossier: Dossier) -> tuple[Fact, ...]:
    """Cache where there is one, parameters, and the FLOPs of a prompt: what pooling and coding cost shows there."""
    found = tuple(fact for fact in measures(dossier) if fact.label in (CACHE, STORED, SIZE))
    flops = next((s for s in sizes_of(dossier.plan) if s.budget.name == "flops"), None) if dossier.plan else None
    if flops is None or dossier.plan is None:
        return found
    after = size_of(flops.budget, dossier.plan.target)
    return (*found, Fact(PROMPT, f"for {flops.budget.length:,} tokens", flops.full, after))


def headline(dossier: Dossier) -> str:
    """The answer in one sentence: what shrank, what that costs, whether it holds."""
    name = base_name(dossier)
    if dossier.plan is None and dossier.verdict is None:
        done = "has been probed; no plan has been made" if dossier.readings else "has not been probed"
        return f"{name} {done} yet."
    first = measures(dossier)[0]
    verb = "will need" if all(size.planned for size in sizes(dossier) if size.label != PROMPT) else "now needs"
    sentence = f"{name} {verb} {changes(dossier)}"
    if dossier.verdict is None:
        why = f" ({dossier.unverified})" if dossier.unverified else ""
        return f"{sentence}; what that costs in quality has not been measured yet{why}."
    return f"{sentence}{_lost(first)}. {judged.headline(dossier.verdict)}"


def _lost(first: Fact) -> str:
    return "" if first.label == "Perplexity" else f"; {_cost(first)}"  # perplexity is given by length


def changes(dossier: Dossier, short: bool = False) -> str:
    """What there is less of, and what that costs: with pooled or coded rows some sizes grow."""
    time = measures(dossier)[-1]
    found = [(size, _grew(size)) for size in (*sizes(dossier), *([time] if short and _clearly(time) else []))]
    less, more = ([_changed(size, short) for size, by in found if by * sign > 0] for sign in (-1, 1))
    words = (listing(less) or "no less of anything") + (f"; in exchange {listing(more)}" if more else "")
    return words + (_lost(measures(dossier)[0]) if short and dossier.verdict else "")


def _grew(fact: Fact) -> float:
    return 0.0 if fact.before is None or fact.after is None else fact.after - fact.before


def _clearly(time: Fact) -> bool:
    """Whether all repeats took longer, or all took less, than the source."""
    if time.before is None or time.low is None or time.high is None:
        return False
    return not time.low <= time.before <= time.high


def _changed(fact: Fact, short: bool) -> str:
    less, more, what = LESS[fact.label]
    by = relative(fact.before, fact.after).lstrip("−+")
    if short:
        return f"{by} {less if _grew(fact) < 0 else more} {what}"
    unit = " bytes per token" if fact.label == CACHE else ""
    return f"{by} {less if _grew(fact) < 0 else more} {what} ({human(fact.before)} → {human(fact.after)}{unit})"


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
    text = "Tailored: every layer has its own sizes, so loading needs headwise, or trust_remote_code=True without it."
    if is_portable(dossier):
        text = "Portable: every layer has the same sizes, so stock transformers loads the folder with no custom code."
    coded = dossier.plan if is_coded(dossier.plan) else None
    if dossier.plan is not None and (most := max(layer.pooled for layer in dossier.plan.source.layers)) > 1:
        text += f" Heads are pooled: {most} key/value heads share a row of the cache"
        text += "." if coded else ", and dimensions of heads are those of a row."
    text += f" The cache is coded in bits: {plan_in_bits(coded)}." if coded else ""
    others = [row for row in rivals(dossier) if not row.chosen]
    rival = next((row for row in others if (row.strategy == "portable") != is_portable(dossier)), None)
    if rival is None or dossier.plan is None:
        return text
    ours, theirs = number(dossier.plan.predicted_damage), number(rival.predicted)
    unit = damage_unit(dossier)
    return f"{text} Predicted damage before healing: {ours} {unit}; with the {rival.strategy} plan {theirs}."


def loading(dossier: Dossier, folder: str = "folder", short: bool = False) -> str:
    """Python that loads the result; short: in one way only."""
    auto, where = use(dossier)[0], json.dumps(folder)
    stock = f"from transformers import {auto}\n\nmodel = {auto}.from_pretrained"
    if is_portable(dossier):
        return f"{stock}({where})"
    how = ", optimise=True" if is_coded(dossier.plan) else ""  # bits are read by kernels, or in C
    if dossier.plan is not None and dossier.plan.target.packed:
        how = ", packed=True"  # else the limit on memory would hold for the file alone
    ours = f"import headwise\nmodel = headwise.load({where}{how})"
    ours += "  # faster on a CPU: optimise=True too" if "packed" in how else ""
    return ours if short else f"{ours}\n\n# or, without headwise:\n{stock}({where}, trust_remote_code=True)"


def damages(dossier: Dossier) -> dict[str, Measure]:
    """The whole plan's damage: predicted before healing, on calibration text, and as measured."""
    found = damage_numbers(dossier.verdict) if dossier.verdict else {}
    if dossier.verdict is None and dossier.plan:
        found = {PREDICTED: Measure(dossier.plan.predicted_damage)}
    return {word: measure for word, measure in found.items() if as_number(measure.value) is not None}


def damage_in_words(dossier: Dossier) -> str:
    """Every number of the plan's damage, with its name, and whether calibration text predicted what was measured."""
    found = damages(dossier)
    if not found:
        return ""
    parts = [f"{word} {WHEN[word]}: {number(measure.value)}" for word, measure in found.items()]
    text = f"Damage in {damage_unit(dossier)}: {'; '.join(parts)}"
    ends, expected = known_ends(found.get(MEASURED)), found.get(CALIBRATION)
    if ends is None:
        return f"{text}."
    text += f" (95% interval {interval(*ends)})."
    if expected is None:
        return text
    inside = "inside" if ends[0] <= expected.value <= ends[1] else "outside"
    return f"{text} What calibration data showed lies {inside} the interval."
