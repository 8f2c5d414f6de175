"""Latency tables of a run: read from its folder, from the user's cache, or measured now. Needs the device.

A table is a file of its own in the run folder, so that planning goes on without the device. The cache keeps what was
measured for any run, under a name that stands for the device, the versions, the model's fixed sizes and the workload;
what was interrupted is found there too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from torch import nn

from headwise import processes, steps
from headwise.errors import BudgetError, HeadwiseError
from headwise.families import Family
from headwise.probes import latency
from headwise.probes._stacks import Stacks
from headwise.probes._watch import Track, silently
from headwise.runfolder import RunFolder
from headwise.types import LatencyTable, ModelShape, Workload, write_atomically
from headwise.types._record import VERSION


def cache_folder() -> Path:
    """Where measured tables are kept between runs: $HEADWISE_CACHE, $XDG_CACHE_HOME/headwise or ~/.cache/headwise."""
    own, shared = os.environ.get("HEADWISE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "headwise"


def tables(
    works: Sequence[Workload],
    family: Family,
    model: nn.Module,
    allow: Iterable[str],
    folder: RunFolder | None,
    track: Track = silently,
) -> tuple[LatencyTable, ...]:
    """A table for every workload, each from the folder if it has it; with several processes the first one measures."""
    allowed, name = tuple(allow), steps.device_name(next(model.parameters()).device)
    shape = family.shape_of(model.config)
    found = []
    for work in works:
        _refuse(family, model, shape, work)
        table = folder.table(work) if folder is not None else None
        if table is not None and table.device != name:
            raise BudgetError(
                f"the table for {work} was measured on {table.device}, this is {name}; delete "
                f"{folder.table_file(work) if folder else 'it'} to measure here, or go on there."
            )
        if table is None or not covers(table, shape, allowed):
            table = processes.by_first(lambda work=work: _measured(family, model, work, allowed, folder, track))  # type: ignore[misc]
            table = table or (folder.table(work) if folder is not None else None)
        if table is None:
            raise BudgetError(f"{work} was not measured; several processes need a run folder that all of them see.")
        found.append(table)
    return tuple(found)


def _refuse(family: Family, model: nn.Module, shape: ModelShape, work: Workload) -> None:
    if any(layer.role for layer in shape.layers):
        raise BudgetError(f"{family.name} models have two stacks, which are not timed yet; use kv, params or flops.")
    if shape.row_tokens is None:
        steps.check_length(family, model.config, work)


def covers(table: LatencyTable, shape: ModelShape, allow: Sequence[str]) -> bool:
    """Whether a table prices everything that a plan may choose."""
    try:
        for lattice in latency.lattices(shape, frozenset(allow)):
            for sizes in zip(*(((axis[0], axis[-1])) for axis in lattice.axes), strict=True):
                table.layer_ms(lattice.shape(table.base, *sizes))
        table.model_ms(shape)
        widths = latency.mlp_sizes(shape, frozenset(allow))
        return bool(table.mlp) and table.mlp[0] <= widths[0] and widths[-1] <= table.mlp[-1]
    except BudgetError:
        return False


def _measured(
    family: Family, model: nn.Module, work: Workload, allow: Sequence[str], folder: RunFolder | None, track: Track
) -> LatencyTable:
    clock = Stacks(family, model, work)
    device = steps.device_name(clock.device)
    facts = _facts(family, clock, model)
    path = cache_folder() / f"latency-{_name(device, facts, work)}.json"
    known = cached(path, device, facts, work)
    table = latency.measure(
        clock, clock.shape, work, allow, clock.chain, device, facts, known, lambda t: _keep(path, t), track
    )
    if folder is not None:
        _write(folder.table_file(work), table)
    return table


def _facts(family: Family, clock: Stacks, model: nn.Module) -> dict[str, str]:
    """Whatever a time depends on beside device, workload and the sizes that plans change."""
    shape, base = clock.shape, latency.base_of(clock.shape)
    config = model.config
    fixed = {
        "dtype": str(clock.dtype).removeprefix("torch."),
        "family": family.kind(config),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "chain": clock.chain,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "base": json.dumps(list(base.to_json().values())),
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


def _keep(path: Path, table: LatencyTable) -> None:
    """Write to the cache; one that cannot be written is done without."""
    try:
        _write(path, table)
    except OSError:
        return


def _write(path: Path, table: LatencyTable) -> None:
    write_atomically(path, json.dumps({"headwise": "LatencyTable", "version": VERSION, **table.to_json()}) + "\n")
