"""What a healing did, as plain data and in words. Whatever its record holds that is no number is left out."""

from typing import Any, NamedTuple

from headwise.report._text import as_number, number


class HealRow(NamedTuple):
    """Relative error of one part of one layer before and after healing."""

    layer: int
    before: float
    after: float


def healing_parts(healing: dict[str, Any] | None) -> dict[str, tuple[HealRow, ...]]:
    """Rows per part of a layer, such as attention and mlp."""
    parts: dict[str, list[HealRow]] = {}
    layers = (healing or {}).get("layers")
    for index, layer in enumerate(layers if isinstance(layers, (list, tuple)) else ()):
        for part, gain in layer.items() if isinstance(layer, dict) else ():
            known = gain if isinstance(gain, dict) else {}
            before, after = as_number(known.get("error_before")), as_number(known.get("error_after"))
            if before is not None and after is not None:
                parts.setdefault(str(part), []).append(HealRow(index, before, after))
    return {part: tuple(rows) for part, rows in parts.items()}


def recovery_in_words(healing: dict[str, Any] | None) -> str:
    """What healing recovered of the damage, on text that nothing was fitted to; empty where that was not measured."""
    healing = healing or {}
    before, after = (as_number(healing.get(name)) for name in ("rehearsed_before", "rehearsed"))
    if before is None or after is None or before <= 0:
        return ""
    if healing.get("kept") is False and not healing.get("tokens"):
        return f"calibration damage {number(before, 3)}: too small to need healing"
    share = f"{1 - after / before:.0%} recovered" if after <= before else "nothing recovered"
    return f"calibration damage {number(before, 3)} before healing, {number(after, 3)} after: {share}"


def healing_in_words(healing: dict[str, Any]) -> str:
    """Method, cost and gain; and which stage did harm and was not kept."""
    sentences = [f"Method: {healing.get('method', 'unknown')}."]
    for name, words in (("tokens", "{} tokens."), ("seconds", "{} seconds."), ("rate", "Learning rate {}."),
                        ("tokens_per_second", "{} tokens per second.")):  # fmt: skip
        if (value := as_number(healing.get(name))) is not None:
            sentences.append(words.format(number(value)))
    if gained := recovery_in_words(healing):
        sentences.append(f"{gained[:1].upper()}{gained[1:]}, on text that nothing was fitted to.")
    if healing.get("kept") is False and (reason := str(healing.get("reason") or "")):
        sentences.append(f"{reason[:1].upper()}{reason[1:]}")
    return " ".join(sentences)


def loss_curve(healing: dict[str, Any], *names: str) -> tuple[tuple[float, float], ...]:
    """Step and loss of a healing that trains, where it kept them: as numbers, pairs or records.

    `names` are the keys under which a record may hold the loss, in this order.
    """
    found: list[tuple[float, float]] = []
    rows = healing.get("curve")
    for index, row in enumerate(rows if isinstance(rows, (list, tuple)) else ()):
        if isinstance(row, dict):
            step, loss = row.get("step", index), next((row[k] for k in names or LOSSES if k in row), None)
        elif names:
            continue
        else:
            step, loss = row if isinstance(row, (list, tuple)) and len(row) == 2 else (index, row)
        step, loss = as_number(step), as_number(loss)
        if step is not None and loss is not None:
            found.append((step, loss))
    return tuple(sorted(found))


LOSSES = ("loss", "kl", "value")


def held_out_curve(healing: dict[str, Any]) -> tuple[tuple[float, float], ...]:
    """Step and loss on held-out text, where it was measured."""
    return loss_curve(healing, "held_out")
