"""The words of the report, in one place: what damage is, its three numbers, and the names of sizes and readings.

Page, terminal and model card take their words from here. Files keep the keys that they have always had.
"""

from headwise.report._text import as_number
from headwise.types import UNIT_OF, Measure, Verdict

PREDICTED, CALIBRATION, MEASURED = "predicted", "calibration", "measured"
WHEN = {  # of the three numbers: before or after healing, and on which text
    PREDICTED: "before healing",
    CALIBRATION: "after healing, on calibration data",
    MEASURED: "after healing, on evaluation data",
}
GLOSSARY = {
    "damage": "How much worse than the source model: the rise of its loss, or the distance of its outputs, in the unit "
    "that is given. One quantity with three numbers: predicted, calibration and measured.",
    PREDICTED: "Damage before healing, added up over all cuts of a plan from what the probes found for each. The "
    "solver makes this sum as small as the budget allows; the slider shows it.",
    CALIBRATION: "Damage after healing, of the finished model on calibration data that nothing was fitted to.",
    MEASURED: "Damage after healing, of the saved model on evaluation data, with a 95% interval. This one is the "
    "quality that is judged against the limit.",
    "healing": "Repairing the weights that are left, so that the cut model follows the source again.",
    "size": "What a model costs: bytes, parameters, FLOPs or milliseconds. A budget limits a size.",
    "computed, not cached": "Dimensions of queries and keys that are computed and then projected to the fewer ones "
    "that the cache holds.",
    "removed": "Weights that the result does not have any more.",
}
AXES = {  # what a reading is read along, in words
    "qk_dim": "query/key dimensions per head",
    "qk_width": "query/key dimensions per head",
    "v_dim": "value dimensions per head",
    "mlp_width": "MLP width",
    "queries_per_group": "query heads per key/value head",
    "kv_heads": "key/value heads",
    "query_head": "query head",
    "kv_head": "key/value head",
    "length": "tokens of text",
    "lag": "tokens back",
}
HEADINGS = {  # of readings that are no damage
    "saturation.slope": "Slope of every head",
    "saturation.jacobian_norm": "Norm of the softmax Jacobian by length",
    "saturation.logit_growth": "Half the range of the logits by length",
    "saturation.largest_weight": "Largest softmax weight by length",
    "spectrum.logit_rank": "Query/key directions in use",
    "spectrum.output_rank": "Value directions in use",
    "spectrum.logit_energy_lost": "Logits lost by query/key dimension",
    "spectrum.output_energy_lost": "Outputs lost by value dimension",
    "lags.contribution": "Contribution by lag",
    "conditioning.outputs": "Condition number of head outputs by tokens",
}


def axis_words(axis: str) -> str:
    """What a reading is read along, as a person would say it."""
    return AXES.get(axis, axis.replace("_", " "))


def reading_words(kind: str, axis: str) -> str:
    """The name of a reading.

    >>> reading_words("damage.mlp", "mlp_width"), reading_words("my_probe.new", "lag")
    ('Damage with MLP channels dropped', 'My probe new by tokens back')
    """
    if unit := UNIT_OF.get(kind):
        return f"Damage with {unit.cut}"
    plain = kind.replace("_", " ").replace(".", " ")
    return HEADINGS.get(kind) or f"{plain[:1].upper()}{plain[1:]} by {axis_words(axis)}"


def known_ends(measure: Measure | None) -> tuple[float, float] | None:
    """The ends of a measure's interval, where both are known."""
    low, high = (as_number(measure.low), as_number(measure.high)) if measure else (None, None)
    return None if low is None or high is None else (low, high)


def damage_numbers(verdict: Verdict) -> dict[str, Measure]:
    """The numbers of damage that a verdict holds, by their word, in the order in which they become known."""
    keys = {PREDICTED: "sum_of_prices", CALIBRATION: "predicted", MEASURED: "measured"}
    return {word: verdict.damage[key] for word, key in keys.items() if key in verdict.damage}
