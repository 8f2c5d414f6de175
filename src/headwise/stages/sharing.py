"""How many heads share cached rows under a limit on time: every way is priced on few tokens, timed, and compared.

Rows that heads share lose less at equal bytes, and take more products to read. Which matters more depends on the
device, the length of the text and the limit, so that only finished plans can tell.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from headwise import processes
from headwise.errors import BudgetError
from headwise.progress import Track, note, silently, stage
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.runs.unfinished import Progress
from headwise.stages.probe import probe
from headwise.stages.source import Source
from headwise.strategies import POOLING
from headwise.types import Plan, Readings
from headwise.types.unit import SIZED

TOKENS = 16_384  # of the calibration text, on which a way is priced
FEW = (1, 2, 4)  # heads that share a row; all of a layer are tried too
CLOSE = 0.01  # by which a plan that was timed may take longer than its limit
S = TypeVar("S", bound=Source)
K = TypeVar("K")
Planner = Callable[[Settings, Source, Readings], Plan]  # makes a plan and times it


def ways(settings: Settings, source: Source) -> tuple[int, ...]:
    """How many heads may share a row, where the run is to choose; otherwise nothing.

    The choice is for models in memory whose time is limited and whose sizes of attention may be cut.
    """
    asked = settings.pool == "auto" and "latency" in settings.limited and set(SIZED) & set(settings.allow)
    one_by_one = {"heads", "kv_heads"} & set(settings.allow)
    if not asked or one_by_one or settings.portable or settings.limits_sizes or settings.strategy not in POOLING:
        return ()
    layers = source.shape.layers
    apart = all(layer.kv_heads and not (layer.role or layer.projected or layer.pooled > 1) for layer in layers)
    if not (source.shape.cached and apart and len({layer.kv_heads for layer in layers}) == 1):
        return ()
    if processes.count() > 1:  # tables are measured by one of them
        return ()
    heads = layers[0].kv_heads
    found = tuple(dict.fromkeys(n for n in (*FEW, heads) if heads % n == 0))
    return found if len(found) > 1 else ()


def with_rows(source: S, heads: int) -> S:
    """The source with rows that so many heads share."""
    if heads == 1:
        return source
    return replace(source, model=source.family.tailor(source.model, heads, share="all"))


def settled(settings: Settings, source: S, folder: RunFolder) -> S:
    """The source with the rows that an earlier probing of this run chose, if there was one."""
    if not ways(settings, source) or not folder.finished("probe"):
        return source
    return with_rows(source, max(layer.pooled for layer in Readings.read(folder.readings_file).source.layers))


def chosen(settings: Settings, source: S, folder: RunFolder, planner: Planner, track: Track = silently) -> S:
    """The source with the rows whose plan is expected to lose least. The choice outlives a kill."""
    found = ways(settings, source)
    if not found or folder.finished("probe"):
        return source
    progress = Progress(folder.probing, f"rows that heads share: {settings.budgets}")
    return with_rows(source, progress.piece("heads", lambda: _best(settings, source, found, planner, track)))


def _best(settings: Settings, source: Source, ways: tuple[int, ...], planner: Planner, track: Track) -> int:
    """The number of heads with the least expected damage, reported in one line."""
    quick = replace(settings, tokens=min(settings.tokens, TOKENS), swap_tokens=0)
    rows = max(1, quick.tokens // source.calibration.shape[1])
    few = replace(source, calibration=source.calibration[:rows])
    tried = " and ".join((", ".join(map(str, ways[:-1])), str(ways[-1])))
    note(f"{tried} heads to a cached row are each priced on few tokens and timed first; --pool none leaves that out.")
    plans: dict[int, Plan] = {}
    refused: list[BudgetError] = []
    for heads in ways:
        way = with_rows(few, heads)
        try:
            readings = probe(quick, way, track, diagnose=False).readings
            with stage(track, f"timing plans, {'no heads share rows' if heads == 1 else f'{heads} heads to a row'}"):
                plans[heads] = planner(quick, way, readings)
        except BudgetError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    best = least(plans)
    note(in_words(settings, plans, best, ways))
    return best


def least(plans: dict[K, Plan]) -> K:
    """The plan that is expected to lose least, of those that keep their limits if any does."""
    return min(plans, key=lambda name: (not _kept(plans[name]), plans[name].predicted_damage))


def _kept(plan: Plan) -> bool:
    """Whether a plan, timed on the device, keeps its limits."""
    return all(plan.spent[limit.key] <= limit.limit * (1 + CLOSE) for limit in plan.budgets)


def in_words(settings: Settings, plans: dict[int, Plan], best: int, ways: tuple[int, ...]) -> str:
    """What was chosen and why, in one line."""

    def told(heads: int) -> str:
        plan = plans.get(heads)
        damage = f"{plan.predicted_damage:.3g}" if plan and _kept(plan) else "out of reach"
        return f"{'none' if heads == 1 else heads} {damage}"

    limit = next(text for text in settings.budgets if text.strip().startswith("latency"))
    what = f"{best} key/value heads share cached rows" if best > 1 else "no heads share cached rows"
    every = ", ".join(map(told, ways))
    return f"{limit}: {what}; expected nats per token by heads that share a row: {every} (--pool sets it)."
