"""Latency tables of a run: read from its folder, from the user's cache, or measured now. Needs the device.

A table is a file of its own in the run folder, so that planning needs no device. The cache keeps what was
measured for any run, under a name that stands for the device, the versions, the model's fixed sizes and the workload;
what was interrupted is found there too.
"""

import hashlib
import json
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from torch import nn

from headwise import budgets as prices
from headwise import processes
from headwise.errors import BudgetError, HeadwiseError
from headwise.families import Family
from headwise.fast.table import cache_folder as cache_folder
from headwise.latency import lattice as latency
from headwise.latency import measuring
from headwise.latency.stacks import Stacks
from headwise.progress import Track, note, silently
from headwise.runs.folder import RunFolder
from headwise.types import VERSION, Budget, LatencyTable, LayerShape, ModelShape, Plan, Workload, write_atomically

CLOSE = 0.01  # by which a plan may take longer than its limit before it is made anew
TRIES = 6  # plans that are timed at most


def tables(
    works: Sequence[Workload],
    family: Family,
    model: nn.Module,
    allow: Iterable[str],
    folder: RunFolder | None,
    track: Track = silently,
) -> tuple[LatencyTable, ...]:
    """A table for every workload, each from the folder if it has it; with several processes the first one measures."""
    allowed, name = tuple(allow), measuring.device_name(next(model.parameters()).device)
    shape = family.shape_of(model.config)
    found = []
    for work in works:
        _refuse(family, model, shape, work)
        table = folder.table(work) if folder else None
        if folder and table and table.device != name:
            raise BudgetError(
                f"the table for {work} was measured on {table.device}, this is {name}; delete "
                f"{folder.table_file(work)} to measure here, or work there."
            )
        missing = table is None or table.runtime != measuring.runtime_of(model) or not covers(table, shape, allowed)
        if processes.agrees(missing):
            table = processes.by_first(lambda work=work: _measured(family, model, work, allowed, folder, track))  # type: ignore[misc]
            table = table or (folder.table(work) if folder else None)
        if table is None:
            raise BudgetError(f"{work} was not measured; several processes need a run folder that all of them see.")
        found.append(table)
    return tuple(found)


class _Tried(NamedTuple):
    """A plan, its time as a whole over each limit, and how far it is above its limits by that or by its table."""

    plan: Plan
    over: dict[str, float]
    off: float


def confirmed(
    plan_for: Callable[[tuple[Budget, ...]], Plan],
    budgets: tuple[Budget, ...],
    source: ModelShape,
    clock_for: Callable[[Workload], latency.Clock],
    keep: Callable[[LatencyTable], None] = lambda table: None,
) -> Plan:
    """The plan for these budgets, timed on the device before it is built.

    A solver prefers layers whose time was measured too short. So the layers that it chose are timed again, and the
    whole plan is timed beside the whole source. Where either takes too long, the limit is tightened by as much as the
    whole is above it, and the solver is asked again. If no plan keeps its limits, the one that is nearest to them comes
    out, and is told of. The plan states the user's limits; `keep` gets the tables as they became.
    """
    clocks = {budget.key: clock_for(budget.workload) for budget in budgets if budget.workload is not None}
    limits, plan, seen, tried = budgets, plan_for(budgets), set[LayerShape](), list[_Tried]()
    for _ in range(TRIES if clocks else 0):
        fresh, seen = set(plan.target.layers) - seen, seen | set(plan.target.layers)
        limits = tuple(_timed_again(b, fresh, source, clocks[b.key]) if b.key in clocks else b for b in limits)
        priced = {b.key: prices.price(b, plan.target) for b in limits if b.key in clocks}
        over = {b.key: _over(plan, source, b, clocks[b.key]) for b in budgets if b.key in clocks}
        told = max(priced[b.key] / b.limit for b in budgets if b.key in clocks)
        tried.append(_Tried(plan, over, max(told, *over.values())))
        if told <= 1 + 1e-9 and max(over.values()) <= 1 + CLOSE:
            break
        limits = tuple(
            replace(b, limit=min(stated.limit, priced[b.key] / over[b.key])) if over.get(b.key, 0.0) > 1 else b
            for b, stated in zip(limits, budgets, strict=True)
        )
        try:
            plan = plan_for(limits)
        except BudgetError:  # out of reach: the certificate shows by how much the plan misses
            break
    best = min(tried, key=lambda one: one.off) if tried else _Tried(plan, {}, 1.0)
    if best.off > 1 + CLOSE:
        several = " and ".join(b.text for b in budgets if b.key in clocks)
        note(f"no plan keeps {several} when it is timed; the nearest takes {best.off - 1:.1%} longer.")
    stated = tuple(replace(b, table=found.table) for b, found in zip(budgets, limits, strict=True))
    for table in (b.table for b in stated if b.table is not None):
        keep(table)
    spent = {b.key: prices.price(b, best.plan.target) for b in stated}
    spent |= {
        b.key: max(spent[b.key], b.limit * best.over[b.key]) for b in stated if best.over.get(b.key, 0) > 1 + CLOSE
    }
    return replace(best.plan, budgets=stated, spent=spent)


def _timed_again(budget: Budget, layers: set[LayerShape], source: ModelShape, clock: latency.Clock) -> Budget:
    if budget.table is None or not layers:
        return budget
    return replace(budget, table=latency.again(clock, budget.table, sorted(layers, key=str), source))


def _over(plan: Plan, source: ModelShape, budget: Budget, clock: latency.Clock) -> float:
    """How much longer a plan takes than it may, both as shares of the source's time; 1 where it cannot be timed."""
    target = tuple(layer for layer in plan.target.layers if not layer.gone)
    try:
        before, after = clock([source.apart.layers, target])
    except BudgetError:  # whole models may not fit where stacks of a few layers did
        return 1.0
    share = statistics.median(b / a for a, b in zip(before, after, strict=True))
    return share * prices.source_price(budget, source) / budget.limit


def clock_of(family: Family, model: nn.Module) -> Callable[[Workload], latency.Clock]:
    """What times models like this one."""
    return lambda work: Stacks(family, model, work, repeats=7)


def _refuse(family: Family, model: nn.Module, shape: ModelShape, work: Workload) -> None:
    if any(layer.role for layer in shape.layers):
        raise BudgetError(f"{family.name} models have two stacks, which are not timed yet; use kv, params or flops.")
    if shape.row_tokens is None:
        measuring.check_length(family, model.config, work)


def covers(table: LatencyTable, shape: ModelShape, allow: Sequence[str]) -> bool:
    """Whether a table prices everything that a plan may choose."""
    try:
        for lattice in latency.lattices(shape, frozenset(allow)):
            for sizes in zip(*((axis[0], axis[-1]) for axis in lattice.axes), strict=True):
                table.layer_ms(lattice.shape(table.base, *sizes))
        for codes in latency.code_lattices(shape, frozenset(allow)):
            for coded in codes.shapes():
                table.layer_ms(coded)
        table.model_ms(shape)
        table.model_ms(shape.apart)
        widths = latency.mlp_sizes(shape, frozenset(allow))
        return bool(table.mlp) and table.mlp[0] <= widths[0] and widths[-1] <= table.mlp[-1]
    except BudgetError:
        return False


def _measured(
    family: Family, model: nn.Module, work: Workload, allow: Sequence[str], folder: RunFolder | None, track: Track
) -> LatencyTable:
    clock = Stacks(family, model, work)
    device = measuring.device_name(clock.device)
    facts = _facts(family, clock, model)
    path = cache_folder() / f"latency-{_name(device, facts, work)}.json"
    known, runtime = cached(path, device, facts, work), facts["runtime"]

    def noted(table: LatencyTable) -> LatencyTable:
        return replace(table, captured=clock.captured and (known is None or known.captured))

    def keep(table: LatencyTable) -> None:
        with suppress(OSError):  # a cache that cannot be written is done without
            _write(path, noted(table))

    asked = clock.shape, work, allow, clock.chain, device, facts, known, keep, track, runtime
    table = noted(latency.measure(clock, *asked))
    if clock.device.type == "cuda" and work.phase == "decode" and not table.captured:
        warnings.warn(f"{work}: steps were not captured but launched one by one, which hides savings.", stacklevel=2)
    if folder is not None:
        _write(folder.table_file(work), table)
    return table


def _facts(family: Family, clock: Stacks, model: nn.Module) -> dict[str, str]:
    """Whatever a time depends on beside device, workload and the sizes that plans change."""
    shape, config = clock.shape, model.config
    fixed = {
        "dtype": str(clock.dtype).removeprefix("torch."),
        "family": family.kind(config),
        "runtime": measuring.runtime_of(model),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "chain": clock.chain,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "base": json.dumps(list(latency.base_of(shape.apart).to_json().values())),
    }
    versions = {package: metadata.version(package) for package in ("torch", "transformers")}
    return {name: str(value) for name, value in {**fixed, **versions}.items()}


def _name(device: str, facts: dict[str, str], work: Workload) -> str:
    text = json.dumps([device, sorted(facts.items()), str(work)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(path: Path, device: str, facts: dict[str, str], work: Workload) -> LatencyTable | None:
    """What the cache knows of the same device and question; a broken file counts as none."""
    try:
        found = LatencyTable.read(path)
    except (HeadwiseError, OSError):
        return None
    return found if (found.device, found.facts, found.workload) == (device, facts, work) else None


def keep_in(folder: RunFolder | None) -> Callable[[LatencyTable], None]:
    """What writes a table into a run folder."""
    return lambda table: None if folder is None else _write(folder.table_file(table.workload), table)


def _write(path: Path, table: LatencyTable) -> None:
    write_atomically(path, json.dumps({"headwise": "LatencyTable", "version": VERSION, **table.to_json()}) + "\n")
