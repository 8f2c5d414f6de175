"""Repairs of a cut model, cheapest first: `refit` (closed form), then methods that train.

A method is one file in this folder, and no other file names it. It defines NAME, MEANING (for help texts), AFTER (the
method that it starts from, or None), OPTIONS (the names of the options that it reads) and

    heal(job: Job) -> tuple[nn.Module, Healing]

which returns a healed copy of `job.cut` and a record with at least `tokens`. A method that divides its tokens among
several methods also defines `stages(options)`: their names in order, each with its own options. A method in which all
processes work together, and keep work in the job's folder, says TOGETHER = True. A method with WORTHWHILE is left
out where the damage is below that already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from headwise.errors import HeadwiseError
from headwise.registry import find, names
from headwise.runs.heal_options import Options
from headwise.types import Gain, Healing, HealingStage

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import nn

    from headwise.heal._job import Job

__all__ = ["check", "healed", "joined", "stages"]
log = logging.getLogger("headwise")
SMALL = 1e-4  # nats per token: too little damage for a warning


def check(method: str, texts: Sequence[str]) -> None:
    """Refuse options that a method does not read, and name a method that does."""
    options = Options.parse(texts)
    read = {name for module, _ in stages(method, options) for name in module.OPTIONS} if method != "none" else set()
    if unread := [name for name in options.given() if name not in read]:
        readers = [other for other in names("headwise.heal") if unread[0] in find("headwise.heal", other).OPTIONS]
        raise HeadwiseError(
            f"--heal {method} does not read the option {unread[0]}, but "
            f"{' and '.join(readers)} would; choose --heal {readers[0]}, or leave out --heal-option {unread[0]}."
        )


class Judgement(Protocol):
    """How good a model is on text that no healing reads: its damage, and whether that is more than another's."""

    def expected_damage(self) -> float: ...
    def worse_than(self, other: Any) -> bool: ...


def healed(method: str, job: Job, judge: Callable[[nn.Module], Judgement] | None = None) -> tuple[nn.Module, Healing]:
    """A copy of `job.cut` healed by a method and, before it, by those that it starts from; and what each did.

    With a `judge` a stage that does harm is not kept: the next one starts from the model before it.
    """
    from headwise import processes

    records: list[Healing] = []
    before = first = judge(job.cut) if judge else None
    for module, options in stages(method, job.options):
        least = getattr(module, "WORTHWHILE", None)
        alone = method == module.NAME and job.task.unit.startswith("nats")
        if before and least and alone and processes.agrees(before.expected_damage() < least):
            reason = f"healing by {module.NAME} was left out: the damage is below {least:g} {job.task.unit} without it."
            records.append(Healing(module.NAME, 0, kept=False, reason=reason))
            continue
        start = time.perf_counter()
        keeps = processes.index() == 0 or getattr(module, "TOGETHER", False)  # work in the folder
        model, record = module.heal(replace(job, options=options, folder=job.folder if keeps else None))
        after = judge(model) if judge else None
        kept = not (after and before and processes.agrees(after.worse_than(before)))
        record = replace(record, method=module.NAME, seconds=time.perf_counter() - start, kept=kept)
        if kept:
            job, before = replace(job, cut=model), after
        elif after and before:
            damages = f"from {before.expected_damage():.3g} to {after.expected_damage():.3g}"
            reason = f"healing by {module.NAME} raised the damage on held-out text {damages} and was not kept."
            record = replace(record, reason=reason)
            log.log(logging.WARNING if after.expected_damage() > SMALL else logging.INFO, "%s", reason)
        records.append(record)
    found = joined(records)
    if first and before:
        found = replace(found, rehearsed_before=first.expected_damage(), rehearsed=before.expected_damage())
    return job.cut, found


def stages(method: str, options: Options) -> list[tuple[ModuleType, Options]]:
    """The module of a method, behind those of the methods that it starts from, each with its options."""
    module = find("headwise.heal", method)
    if hasattr(module, "stages"):
        return [(find("headwise.heal", name), own) for name, own in module.stages(options)]
    return [*(stages(module.AFTER, options) if module.AFTER else ()), (module, options)]


def joined(records: list[Healing]) -> Healing:
    """One record of all stages: the last one's, with the gains, tokens and seconds of all."""
    layers: list[dict[str, Gain]] = [{} for _ in max((record.layers or () for record in records), key=len)]
    for record in records:
        for layer, gains in zip(layers, (record.layers or ()) if record.kept else (), strict=False):
            layer.update(gains)
    return replace(
        records[-1],
        tokens=sum(record.tokens or 0 for record in records),
        seconds=sum(record.seconds or 0.0 for record in records),
        layers=tuple(layers),
        stages=tuple(HealingStage(r.method, r.tokens or 0, r.seconds or 0.0, r.kept) for r in records),
        kept=all(record.kept for record in records),
        reason=" ".join(record.reason for record in records if record.reason) or None,
    )
