"""What a user may limit. One price per file; each says how a layer is priced and, if that is not all, a model."""

import re
from collections.abc import Sequence
from types import ModuleType

from headwise.errors import BudgetError
from headwise.registry import find, names, texts
from headwise.types import Budget, LatencyTable, LayerShape, ModelShape, Workload

SUFFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}
DEFAULT_LENGTH = 2048
WRITTEN = re.compile(r"\s*(\w+)\s*=\s*([0-9.]+)\s*([a-zA-Z%]*)\s*(?:@\s*([\w.,\s]*\w[\w.,\s]*|\.))?\s*")
SEVERAL = re.compile(r"[,;&+\s]+(?=\w+\s*=)")
MEANT = {  # what people write for the names of budgets
    "cache": "kv", "kv_cache": "kv", "kvcache": "kv", "parameters": "params", "size": "weights", "bytes": "weights",
    "compute": "flops", "time": "latency", "speed": "latency", "ram": "memory", "vram": "memory",
}  # fmt: skip
EXAMPLES = ", ".join(texts("headwise.budgets", "EXAMPLE").values())


def parse(text: str, source: ModelShape, tables: Sequence[LatencyTable] = ()) -> Budget:
    """Read a budget such as `kv=50%`, `kv=2GiB@32k`, `params=20M`, `flops=80%@8k` or `latency=80%@decode,32k,b8`.

    A percentage is of the source model; `@` gives the context length at which the price is meant. A latency is priced
    by the one of the measured `tables` that belongs to its phase, length and batch.
    """
    match = read(text)
    if match[1] == "latency":
        return _latency(text, match, source, tables)
    at, batch = _served(match)
    name, number, suffix, _ = match.groups()
    price = find("headwise.budgets", name)
    if name == "kv" and not source.cached:
        raise BudgetError(f"{text}: {source.family} models keep no cache; use params, flops or attention.")
    length = _length(at, text) if at else source.row_tokens or DEFAULT_LENGTH
    amount = _amount(number, suffix, text)
    if suffix == "%":
        limit = amount / 100 * _model_cost(price, source, length, *([batch] if batch > 1 else []))
    else:
        units = BYTES if price.UNIT.startswith("bytes") else SUFFIXES
        if suffix.lower() not in units:
            raise BudgetError(f"{text}: '{suffix}' is no unit of {name}; known: %, {', '.join(u for u in units if u)}.")
        limit = amount * units[suffix.lower()]
        if price.PER_LENGTH:
            if not at:
                raise BudgetError(
                    f"{text}: say for how many tokens, as in {name}={number}{suffix}@32k, or give a percentage."
                )
            limit /= length
    return Budget(name=name, unit=price.UNIT, limit=limit, length=length, text=text.replace(" ", ""), batch=batch)


def read(text: str) -> re.Match[str]:
    """The parts of a budget, as far as they can be checked without a model: its form and its name."""
    match = WRITTEN.fullmatch(text)
    _refuse_several(text)
    _refuse_slips(text, match)
    if not match or (match[1] != "latency" and not re.fullmatch(r"[0-9.]+[kK]?", _served(match)[0] or "0")):
        raise BudgetError(f"cannot read the budget '{text}'. Write it like one of: {EXAMPLES}.")
    find("headwise.budgets", match[1])
    return match


def _served(match: re.Match[str]) -> tuple[str, int]:
    """What stands behind the `@`: a length, and texts at a time where a price depends on them (`8k,b4`)."""
    length, _, batch = (match[4] or "").strip().partition(",")
    per_batch = match[1] in known() and getattr(find("headwise.budgets", match[1]), "PER_BATCH", False)
    texts = re.fullmatch(r"b([1-9][0-9]{0,5})", batch.strip()) if per_batch else None
    return (length, int(texts[1])) if texts else ((match[4] or "").strip(), 1)


def _refuse_several(text: str) -> None:
    """Refuse several limits in one word: a comma already divides what stands behind an `@`."""
    limits = [part.strip() for part in SEVERAL.split(text.strip())]
    if len(limits) > 1:
        raise BudgetError(
            f"'{text}' holds {len(limits)} limits; give each its own: --budget {' --budget '.join(limits)}."
        )


def _refuse_slips(text: str, match: re.Match[str] | None) -> None:
    """Refuse a name in capitals or another word for it, and a number without a unit, with what was probably meant.

    >>> _refuse_slips("KV=0.75", WRITTEN.fullmatch("KV=0.75"))
    Traceback (most recent call last):
    headwise.errors.BudgetError: cannot read the budget 'KV=0.75'; did you mean kv=75%?
    """
    if match and match[1] not in known() and (meant := MEANT.get(match[1].lower())):
        example = texts("headwise.budgets", "EXAMPLE")[meant].split(", ")[0]
        raise BudgetError(f"no budget is called '{match[1]}'; did you mean {meant}, as in {example}?")
    if match is None or match[1].lower() not in known():
        return
    name, number, suffix, at = match.groups()
    share = not suffix and number.count(".") < 2 and number != "." and 0 < float(number) <= 100
    if name == name.lower() and not share:
        return
    amount = f"{float(number) * (100 if float(number) < 1 else 1):g}%" if share else f"{number}{suffix}"
    meant = f"{name.lower()}={amount}" + (f"@{at.strip()}" if at else "")
    raise BudgetError(f"cannot read the budget '{text}'; did you mean {meant}?")


def _amount(number: str, suffix: str, text: str) -> float:
    try:
        amount = float(number)
    except ValueError:
        raise BudgetError(f"'{number}' in the budget '{text}' is not a number. Examples: {EXAMPLES}.") from None
    if suffix == "%" and not 0 < amount <= 100:
        raise BudgetError(f"{text}: a percentage of the source lies above 0 and at most at 100.")
    return amount


def parse_all(texts: Sequence[str], source: ModelShape, tables: Sequence[LatencyTable] = ()) -> tuple[Budget, ...]:
    """Read several budgets; two limits on one price are refused, as a plan could say only once what it spends."""
    _refuse_twice(texts, source)
    return tuple(parse(text, source, tables) for text in texts)


def without_times(texts: Sequence[str], source: ModelShape) -> tuple[Budget, ...]:
    """Read several budgets before anything is timed: limits on time are checked as far as they go, and left out."""
    _refuse_twice(texts, source)
    others = []
    for text in texts:
        match = WRITTEN.fullmatch(text)
        _refuse_slips(text, match)
        if match and match[1] == "latency":
            _time(text, match, source)
        else:
            others.append(parse(text, source))
    return tuple(others)


def _refuse_twice(texts: Sequence[str], source: ModelShape) -> None:
    seen: dict[tuple[str, Workload | None], str] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        work = workload(rest.partition("@")[2], source) if name.strip() == "latency" else None
        if first := seen.get(key := (name.strip(), work)):
            raise BudgetError(f"{first} and {text} limit the same price; give one of them.")
        seen[key] = text


def _time(text: str, match: re.Match[str], source: ModelShape) -> tuple[float, Workload]:
    """What a limit on time says, and of what."""
    _, number, suffix, at = match.groups()
    amount, work = _amount(number, suffix, text), workload(at or "", source)
    if suffix != "%" and suffix.lower() not in TIMES:
        raise BudgetError(f"{text}: '{suffix}' is no unit of latency; known: %, {', '.join(TIMES)}.")
    return amount, work


def _latency(text: str, match: re.Match[str], source: ModelShape, tables: Sequence[LatencyTable]) -> Budget:
    """A limit on time: milliseconds, or a percentage of the source's as the table has it."""
    (amount, work), suffix = _time(text, match, source), match[3]
    table = next((table for table in tables if table.workload == work), None)
    if table is None:
        raise BudgetError(
            f"{text}: latency is measured on the device that the model will run on, and {work} was not yet; there: "
            f"headwise probe MODEL --latency {work} --out FOLDER"
        )
    limit = amount / 100 * table.model_ms(source.apart) if suffix == "%" else amount * TIMES[suffix.lower()]
    return Budget("latency", "ms", limit, work.length, text.replace(" ", ""), work, table.device, table)


def workload(at: str, source: ModelShape) -> Workload:
    """What a latency is of, as `--budget` names it behind the `@`; models that keep no cache only read."""
    work = Workload.parse(at, source.row_tokens or DEFAULT_LENGTH)
    if not source.cached and "decode" in at:
        raise BudgetError(f"{at}: {source.family} models do not write token by token; use prefill.")
    return work if source.cached else Workload("prefill", work.length, work.batch)


def workloads(texts: Sequence[str], source: ModelShape) -> tuple[Workload, ...]:
    """What has to be timed before these budgets can be read."""
    cut = [text.partition("=") for text in texts]
    return tuple(
        dict.fromkeys(workload(rest.partition("@")[2], source) for name, _, rest in cut if name.strip() == "latency")
    )


def _length(at: str, text: str) -> int:
    """Tokens of context: a k is 1,024 of them."""
    try:
        length = int(float(at.rstrip("kK")) * (1024 if at[-1] in "kK" else 1))
    except ValueError:
        length = 0
    if length < 1:
        raise BudgetError(f"'@{at}' in the budget '{text}' is no context length. Examples: {EXAMPLES}.")
    return length


def price(budget: Budget, model: ModelShape) -> float:
    """What a model costs in the budget's unit."""
    return _model_cost(find("headwise.budgets", budget.name), model, *_at(budget))


def source_price(budget: Budget, source: ModelShape) -> float:
    """What the source costs, of which a share is meant: time is that of the model as it was before heads were pooled.

    Bytes, parameters and FLOPs are the same before and after.
    """
    return price(budget, source.apart if budget.workload else source)


def _model_cost(price: ModuleType, model: ModelShape, *at: int | LatencyTable) -> float:
    """What a price says of a whole model; where it says nothing, the sum over its layers."""
    if hasattr(price, "model_cost"):
        return float(price.model_cost(model, *at))
    return sum(float(price.layer_cost(model, layer, *at)) for layer in model.layers)


def layer_price(budget: Budget, model: ModelShape, layer: LayerShape) -> float:
    """What one layer adds to that."""
    return float(find("headwise.budgets", budget.name).layer_cost(model, layer, *_at(budget)))


def joint(budget: Budget) -> bool:
    """Whether a layer's price is more than a sum over its query/key and value sizes, as kernels want both to fit."""
    return budget.name == "latency"


def _at(budget: Budget) -> tuple[int | LatencyTable, ...]:
    """What a price depends on beside the shape: a length and texts at a time, or a measured table."""
    if budget.name != "latency":
        return (budget.length, budget.batch) if budget.batch > 1 else (budget.length,)
    if budget.table is None:
        raise BudgetError(
            f"{budget.text} was priced by a table of {budget.device or 'a device'} that is not here; put the run's "
            f"latency-*.json beside the plan, or measure again: headwise probe MODEL --latency {budget.workload}."
        )
    return (budget.table,)


def of_cache(budget: Budget) -> bool:
    """Whether a smaller cache is cheaper under a budget, whatever it is made of."""
    return budget.name in ("kv", "memory")


def of_weights(budget: Budget) -> bool:
    """Whether weights in fewer bits are cheaper under a budget."""
    return budget.name in ("weights", "memory")


def known() -> tuple[str, ...]:
    """The names of all budgets."""
    return names("headwise.budgets")
