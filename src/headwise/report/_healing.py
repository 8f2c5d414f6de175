"""What a healing did, as plain data and in words."""

from typing import NamedTuple

from headwise.report._text import as_number, number
from headwise.types import Healing


class HealRow(NamedTuple):
    """Relative error of one part of one layer before and after healing."""

    layer: int
    before: float
    after: float


def healing_parts(healing: Healing | None) -> dict[str, tuple[HealRow, ...]]:
    """Rows per part of a layer, such as attention and mlp; errors that are not finite are left out."""
    parts: dict[str, list[HealRow]] = {}
    for index, layer in enumerate((healing and healing.layers) or ()):
        for part, gain in layer.items():
            before, after = as_number(gain.error_before), as_number(gain.error_after)
            if before is not None and after is not None:
                parts.setdefault(part, []).append(HealRow(index, before, after))
    return {part: tuple(rows) for part, rows in parts.items()}


def recovery_in_words(healing: Healing | None) -> str:
    """What healing recovered of the damage, on text that nothing was fitted to; empty where that was not measured."""
    before, after = (healing.rehearsed_before, healing.rehearsed) if healing else (None, None)
    if healing is None or before is None or after is None or before <= 0:
        return ""
    if healing.kept is False and not healing.tokens:
        return f"calibration damage {number(before, 3)}: too small to need healing"
    share = f"{1 - after / before:.0%} recovered" if after <= before else "nothing recovered"
    return f"calibration damage {number(before, 3)} before healing, {number(after, 3)} after: {share}"


def healing_in_words(healing: Healing) -> str:
    """Method, cost and gain; and which stage did harm and was not kept."""
    sentences = [f"Method: {healing.method}."]
    for value, words in (
        (healing.tokens, "{} tokens."),
        (healing.seconds, "{} seconds."),
        (healing.rate, "Learning rate {}."),
        (healing.tokens_per_second, "{} tokens per second."),
    ):
        if value is not None:
            sentences.append(words.format(number(value)))
    if gained := recovery_in_words(healing):
        sentences.append(f"{gained[:1].upper()}{gained[1:]}, on text that nothing was fitted to.")
    if healing.kept is False and healing.reason:
        sentences.append(f"{healing.reason[:1].upper()}{healing.reason[1:]}")
    return " ".join(sentences)


def loss_curve(healing: Healing, held_out: bool = False) -> tuple[tuple[float, float], ...]:
    """Step and loss of a healing that trains: while training, or on held-out text where that was measured."""
    found = ((point.step, as_number(point.held_out if held_out else point.loss)) for point in healing.curve or ())
    return tuple(sorted((float(step), loss) for step, loss in found if loss is not None))
