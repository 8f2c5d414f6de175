"""Words and numbers on their way into HTML, SVG and Markdown: nothing foreign leaves this file unescaped."""

import html
import json
import math
import re
from typing import Any

MISSING = "–"
# What XML forbids, and the marks that turn the direction of all text after them.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")
_MARKDOWN = {
    "|": "&#124;",
    "`": "&#96;",
    "[": "&#91;",
    "]": "&#93;",
    "*": "&#42;",
    "\\": "&#92;",
    "~": "&#126;",
    "$": "&#36;",
}


def clean(text: object) -> str:
    """Any value as text that XML and UTF-8 can carry."""
    return _ILLEGAL.sub("\ufffd", str(text))


def escape(text: object) -> str:
    """Safe between tags and inside a quoted attribute, of HTML and of SVG."""
    return html.escape(clean(text), quote=True)


def for_script(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or a line of JavaScript.

    >>> for_script({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """The value with text cleaned and None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {clean(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return clean(value) if isinstance(value, str) else value


def cell(text: object) -> str:
    """Safe inside one cell or line of Markdown: no markup, no HTML, no new line.

    >>> cell("a|b <i>")
    'a&#124;b &lt;i&gt;'
    """
    flat = html.escape(" ".join(clean(text).split()), quote=False)
    flat = "".join(_MARKDOWN.get(letter, letter) for letter in flat)
    return re.sub(r"(?<!\w)_|_(?!\w)", "&#95;", flat)  # an underscore inside a word is no markup


def fence(text: object, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks inside it."""
    body = clean(text)
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"{ticks}{language}\n{body}\n{ticks}"


def short(text: object, most: int) -> str:
    """The text, cut with an ellipsis where it is longer than `most`."""
    whole = clean(text)
    return whole if len(whole) <= most else whole[: most - 1] + "…"


def as_number(value: Any) -> float | None:
    """The value where it is a finite number, else None: what comes from a dictionary may be anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def number(value: float | None, digits: int = 4) -> str:
    """So many significant digits; whole numbers in full, with thousands marked.

    >>> number(8192), number(18.2149), number(1227.4), number(0.000123), number(None)
    ('8,192', '18.21', '1,227', '0.000123', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3:
        return small(value, min(digits, 3))
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".") if abs(value) >= 1 else f"{value:.{digits}g}"


def small(value: float, digits: int) -> str:
    """A number far below one as people write it; with an exponent only below a millionth.

    >>> small(0.00012345, 2), small(0.00001, 3), small(2e-9, 1)
    ('0.00012', '0.00001', '2e-9')
    """
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if int(exponent) < -6:
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits - 1 - int(exponent)}f}".rstrip("0")


def interval(low: float, high: float, digits: int = 4) -> str:
    """The ends of an interval.

    >>> interval(0.25, 1.5)
    '0.25 to 1.500'
    """
    return f"{number(low, digits)} to {number(high, digits)}"


def human(value: float | None) -> str:
    """Like `number`, with millions and billions shortened.

    >>> human(20_143_104)
    '20.14M'
    """
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value is not None and math.isfinite(value) and abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return number(value)


def relative(before: float | None, after: float | None) -> str:
    """The change in percent, signed; a dash where it has no meaning.

    >>> relative(200, 150), relative(200, 249), relative(200, 540), relative(1e4, 10_006), relative(4, 4)
    ('−25%', '+24.5%', '+170%', '+0.06%', '0%')
    """
    if before is None or after is None or before == 0:
        return MISSING
    found = (after / before - 1) * 100
    digits = 0 if abs(found) >= 100 else 1 if abs(found) >= 0.095 else 2
    text = f"{found:+,.{digits}f}".removesuffix(".00").removesuffix(".0")
    return "0%" if text in ("+0", "-0") else f"{text}%".replace("-", "−")


def words(key: str) -> str:
    """A key such as `decode_ms_per_token` as a person would write it."""
    known = {"kl": "KL divergence from the source", "kv": "KV"}
    text = known.get(key, key.replace("_", " "))
    text = re.sub(r"\bkv\b", "KV", text)
    return text[:1].upper() + text[1:]


def listing(items: list[str]) -> str:
    """a, b and c."""
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else "".join(items)
