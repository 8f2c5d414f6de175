"""Repairs, cheapest first: `refit` (closed form), then methods that learn. One per file, found by its folder.

A method is a module with NAME, MEANING, AFTER (the healing that it starts from, or None), OPTIONS (those it reads) and
`heal(job: Job) -> tuple[nn.Module, dict]`: a healed copy of `job.cut`, and a record with `tokens`, and where there is
such a thing `layers` (per layer and part, `error_before` and `error_after`) and `curve` (a list of `{step, loss}`).
One that shares its tokens with others has `stages(options)`: the names of all, in order, each with its own options.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.heal._options import Options
from headwise.registry import find, names

if TYPE_CHECKING:  # asking for a name must not take the seconds that torch takes
    from torch import nn

    from headwise.heal._job import Job

__all__ = ["check", "healed", "stages"]


def check(method: str, texts: Sequence[str]) -> None:
    """Refuse options that a healing would not read, and say which healing does."""
    options = Options.parse(texts)
    given = options.given()
    read = {name for module, _ in stages(method, options) for name in module.OPTIONS} if method != "none" else set()
    if unread := [name for name in given if name not in read]:
        readers = [other for other in names("headwise.heal") if unread[0] in find("headwise.heal", other).OPTIONS]
        raise HeadwiseError(
            f"--heal {method}{' as asked' if method in readers else ''} does not read the option {unread[0]}, but "
            f"{' and '.join(readers)} would; choose --heal {readers[0]}, or leave out --heal-option {unread[0]}."
        )


def healed(method: str, job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of `job.cut` healed by a method and, before it, by those that it starts from; and what each did."""
    from headwise import processes

    records: list[dict[str, Any]] = []
    for module, options in stages(method, job.options):
        start = time.perf_counter()
        alone = processes.index() == 0 or getattr(module, "TOGETHER", False)  # may it keep work in the folder?
        own = replace(job, options=options, folder=job.folder if alone else None)
        model, record = module.heal(own)
        records.append({"method": module.NAME, **record, "seconds": time.perf_counter() - start})
        job = replace(job, cut=model)
    return job.cut, _joined(records)


def stages(method: str, options: Options) -> list[tuple[ModuleType, Options]]:
    """The method's module, behind those it starts from, each with what it is told."""
    module = find("headwise.heal", method)
    if hasattr(module, "stages"):
        return [(find("headwise.heal", name), own) for name, own in module.stages(options)]
    return [*(stages(module.AFTER, options) if module.AFTER else ()), (module, options)]


def _joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of all stages: the last one's, with the gains per layer, tokens and seconds of all, a line of each."""
    layers: list[dict[str, Any]] = [{} for _ in max((record.get("layers", ()) for record in records), key=len)]
    for record in records:
        for layer, gains in zip(layers, record.get("layers", ()), strict=False):
            layer.update(gains)
    parts = [{key: record.get(key) for key in ("method", "tokens", "seconds")} for record in records]
    sums = {key: sum(record[key] for record in records) for key in ("tokens", "seconds")}
    return {**records[-1], **sums, "layers": layers, "stages": parts}
