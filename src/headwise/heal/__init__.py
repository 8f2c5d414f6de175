"""Repairs, cheapest first: `refit` (closed form), then methods that learn. One per file, found by its folder.

A method is a module with NAME, MEANING, AFTER (the healing that it starts from, or None), OPTIONS (those it reads) and
`heal(job: Job) -> tuple[nn.Module, dict]`: a healed copy of `job.cut`, and a record with `tokens`, and where there is
such a thing `layers` (per layer and part, `error_before` and `error_after`) and `curve` (a list of `{step, loss}`).
One that shares its tokens with others has `stages(options)`: the names of all, in order, each with its own options.
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

if TYPE_CHECKING:  # asking for a name must not take the seconds that torch takes
    from torch import nn

    from headwise.heal._job import Job

__all__ = ["check", "healed", "stages"]
log = logging.getLogger("headwise")


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


class Judgement(Protocol):
    """How good a model is on text that no healing reads."""

    def expected_damage(self) -> float:
        """Damage to expect on other text."""
        ...

    def worse_than(self, other: Any) -> bool:
        """Whether the damage is larger than that of another model, beyond noise."""
        ...


def healed(
    method: str, job: Job, judge: Callable[[nn.Module], Judgement] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of `job.cut` healed by a method and, before it, by those that it starts from; and what each did.

    With a `judge` a stage that does harm is not kept: the next one starts from the model before it.
    """
    from headwise import processes

    records: list[dict[str, Any]] = []
    before = first = judge(job.cut) if judge else None
    for module, options in stages(method, job.options):
        start = time.perf_counter()
        alone = processes.index() == 0 or getattr(module, "TOGETHER", False)  # may it keep work in the folder?
        own = replace(job, options=options, folder=job.folder if alone else None)
        model, record = module.heal(own)
        after = judge(model) if judge else None
        kept = not (after and before and processes.agrees(after.worse_than(before)))
        record = {"method": module.NAME, **record, "seconds": time.perf_counter() - start, "kept": kept}
        if kept:
            job, before = replace(job, cut=model), after
        elif after and before:
            record["reason"] = _harm_in_words(module.NAME, before, after)
            log.warning("%s", record["reason"])
        records.append(record)
    found = _joined(records)
    if first and before:
        found |= {"rehearsed_before": first.expected_damage(), "rehearsed": before.expected_damage()}
    return job.cut, found


def _harm_in_words(name: str, before: Judgement, after: Judgement) -> str:
    damages = f"from {before.expected_damage():.3g} to {after.expected_damage():.3g}"
    return f"healing by {name} raised the damage on held-out text {damages} and was not kept."


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
        for layer, gains in zip(layers, record.get("layers", ()) if record["kept"] else (), strict=False):
            layer.update(gains)
    parts = [{key: record.get(key) for key in ("method", "tokens", "seconds", "kept")} for record in records]
    sums = {key: sum(record[key] for record in records) for key in ("tokens", "seconds")}
    dropped = {"reason": " ".join(record["reason"] for record in records if not record["kept"])}
    kept = all(record["kept"] for record in records)
    return {**records[-1], **sums, "layers": layers, "stages": parts, "kept": kept, **({} if kept else dropped)}
