"""Repairs, cheapest first: `refit` (closed form), then methods that learn. One per file, found by its folder.

A method is a module with NAME, MEANING, AFTER (the healing that it starts from, or None) and
`heal(job: Job) -> tuple[nn.Module, dict]`: a healed copy of `job.cut`, and a record with `tokens`, and where there is
such a thing `layers` (per layer and part, `error_before` and `error_after`) and `curve` (a list of `{step, loss}`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headwise.registry import find

if TYPE_CHECKING:  # asking for a name must not take the seconds that torch takes
    from torch import nn

    from headwise.heal._job import Job

__all__ = ["healed"]


def healed(method: str, job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of `job.cut` healed by a method and, before it, by those that it starts from; and what each did."""
    from headwise import processes

    records: list[dict[str, Any]] = []
    for module in _chain(method):
        start = time.perf_counter()
        alone = processes.index() == 0 or getattr(module, "TOGETHER", False)  # may it keep work in the folder?
        model, record = module.heal(job if alone else replace(job, folder=None))
        records.append({"method": module.NAME, **record, "seconds": time.perf_counter() - start})
        job = replace(job, cut=model)
    return job.cut, _joined(records)


def _chain(method: str) -> list[ModuleType]:
    """The method's module, behind those it starts from."""
    module = find("headwise.heal", method)
    return [*(_chain(module.AFTER) if module.AFTER else ()), module]


def _joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of all stages: the last one's, with every stage's gains per layer, all seconds, and a line of each."""
    layers: list[dict[str, Any]] = [{} for _ in max((record.get("layers", ()) for record in records), key=len)]
    for record in records:
        for layer, gains in zip(layers, record.get("layers", ()), strict=False):
            layer.update(gains)
    stages = [{key: record.get(key) for key in ("method", "tokens", "seconds")} for record in records]
    return {**records[-1], "layers": layers, "seconds": sum(r["seconds"] for r in records), "stages": stages}
