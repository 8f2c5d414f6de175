"""What every stage works with: the model on our modules, and the rows that it is calibrated and judged on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import data, families, tasks
from headwise.errors import HeadwiseError, PlanError
from headwise.families import Family
from headwise.probes._watch import Track, silently
from headwise.runfolder import Settings
from headwise.tasks.causal import Causal


class Workbench(NamedTuple):
    """What every stage needs: the source model on our modules, its family and what reads for it, and the rows."""

    family: Family
    source: nn.Module
    tokenizer: Any
    calibration: torch.Tensor
    rehearsal: torch.Tensor  # of the calibration's source, kept from every fit: predicts the damage before evaluation
    evaluation: torch.Tensor
    described: str
    task: tasks.Task = Causal()
    truth: torch.Tensor | None = None  # the right answers to the evaluation, where they are known

    def inputs(self, tokens: torch.Tensor, seed: int) -> torch.Tensor:
        """Blocks of text as the model reads them in its task."""
        return self.task.prepare(tokens, seed).inputs


def workbench(settings: Settings, track: Track = silently) -> Workbench:
    """Load the model and cut the text into blocks; calibration and evaluation never share a block."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = families.load(settings.model, device, settings.trust_remote_code, settings.task)
    task = tasks.of(model, tokenizer, settings.model)
    if settings.strategy == "bound" and not task.has_past:
        raise PlanError("strategy bound reckons with how far back a text is read, which no encoder has; use exact.")
    family = families.family_of(model.config)
    if lost := sorted(set(settings.allow) - {*family.units, "depth"}):
        known = ", ".join((*family.units, "depth"))
        raise PlanError(f"{family.name} models cannot lose {lost[0]}; --allow takes, of these models: {known}.")
    length = min(settings.length, family.longest(model.config))
    wanted = [max(1, tokens // task.block_tokens(length)) for tokens in (settings.tokens, settings.eval_tokens)]
    source = settings.data or ("stdlib" if settings.model == families.EMBEDDED else "self")

    def read(name: str, count: int, seed: int) -> data.Rows:
        if name.endswith("+self"):  # what there is, topped up by the model's own text
            own = read(name.removesuffix("+self"), count, seed).rows
            more = [read("self", count - len(own), seed).rows] if len(own) < count else []
            return data.Rows(torch.cat((own, *more)))
        if name == "self":
            return data.Rows(data.written_by(model, count, length, seed, track=track))
        found = task.read(name, tokenizer, length, count, settings.seed)
        return found._replace(rows=task.complete(model, found.rows, seed, track))

    if settings.eval is not None:
        calibration, evaluation = (
            read(source, wanted[0], settings.seed),
            read(settings.eval, wanted[1], settings.seed + 1),
        )
        described = settings.eval
    else:
        both = read(source, sum(wanted), settings.seed)
        if len(both.rows) < 2:
            raise HeadwiseError(f"{source} is enough for one row only; give a longer --data, or --eval.")
        split = max(1, len(both.rows) * wanted[0] // sum(wanted))
        calibration, evaluation = both.part(slice(split)), both.part(slice(split, None))
        described = f"held out from {source}"
    rows = calibration.rows
    kept = torch.arange(len(rows)) % 8 != 7  # every eighth row is for the rehearsal
    rehearsal = rows[~kept] if len(rows) >= 8 else rows
    bench = Workbench(family, family.tailor(model), tokenizer, rows[kept], rehearsal, evaluation.rows, described)
    return bench._replace(task=task, truth=evaluation.truth)
