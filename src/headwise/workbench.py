"""What every stage works with: the model on our modules, and the rows that it is calibrated and judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import data, families, processes, tasks
from headwise.checks import _lengths as lengths
from headwise.errors import DataError, HeadwiseError, PlanError
from headwise.families import Family
from headwise.heal._job import Job
from headwise.heal._options import Options
from headwise.memory import fits
from headwise.probes._watch import Track, silently
from headwise.runfolder import Settings
from headwise.tasks.causal import Causal


class LongText(NamedTuple):
    """Held-out tokens (N) in one piece, which rows of any length can be cut from; as many as asked for, or fewer."""

    tokens: torch.Tensor
    start: int | None  # the token that begins every row, where there is one


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
    more: torch.Tensor | None = None  # rows of the calibration's source for a healing that reads much
    spread: bool = False  # whether gradients are computed on all GPUs together, for a model that fits on none
    long: LongText | None = None  # held-out text in one piece, for rows of any length

    def inputs(self, tokens: torch.Tensor, seed: int) -> torch.Tensor:
        """Blocks of text as the model reads them in its task."""
        return self.task.prepare(tokens, seed).inputs

    def job(self, settings: Settings, cut: nn.Module, track: Track = silently, folder: Path | None = None) -> Job:
        """What there is to heal of a cut model; `folder` keeps work that takes long."""
        text, held = (self.task.prepare(rows, settings.seed) for rows in (self.calibration, self.rehearsal))
        options = Options.parse(settings.heal_options)
        more = None if self.more is None else self.task.prepare(self.more, settings.seed)
        return Job(self.family, self.task, self.source, cut, text, held, settings.seed, track, folder, options, more)


def workbench(settings: Settings, track: Track = silently) -> Workbench:
    """Load the model and cut the text into blocks; calibration and evaluation never share a block."""
    device = processes.begin(settings.device)
    model, tokenizer = families.load(settings.model, "cpu", settings.trust_remote_code, settings.task)
    alone = settings.device == "auto" and device == "cuda" and processes.count() == 1
    large = alone and not fits(_numbers(model), device)
    model = model if large else model.to(device)  # a large one stays in host memory, and is lent the GPUs
    task = tasks.of(model, tokenizer, settings.model)
    if settings.strategy == "bound" and not task.has_past:
        raise PlanError("strategy bound reckons with how far back a text is read, which no encoder has; use exact.")
    family = families.family_of(model.config)
    if lost := sorted(set(settings.allow) - {*family.units, "depth"}):
        known = ", ".join((*family.units, "depth"))
        raise PlanError(f"{family.name} models cannot lose {lost[0]}; --allow takes, of these models: {known}.")
    texts = read_texts(settings, family, model.config, tokenizer, task, model, track)
    bench = Workbench(family, family.tailor(model, pooled_heads(settings, family, model)), tokenizer, *texts[:4])
    return bench._replace(task=task, truth=texts.truth, more=texts.more, spread=large, long=texts.long)


def pooled_heads(settings: Settings, family: Family, model: nn.Module) -> int:
    """How many key/value heads are to share a cached row; of a model whose heads do so already, no more."""
    shape = family.shape_of(model.config)
    if pooled := any(layer.pooled > 1 for layer in shape.layers):
        settings.refuse_to_pool()
    if settings.pool == "none":
        return 1
    if pooled:
        raise PlanError("heads of this model share rows already; leave out --pool, or pool those of its source.")
    turned_less = any(name.endswith("pairs_GP") for name, _ in model.named_buffers())
    if turned_less or any(layer.projected for layer in shape.layers):
        raise PlanError("queries and keys of this model are cut already; leave out --pool, or pool its source's heads.")
    if not shape.cached or any(layer.role for layer in shape.layers):
        raise PlanError(f"only decoders have a cache whose rows heads can share; leave out --pool for {family.name}.")
    heads = {layer.kv_heads for layer in shape.layers}
    if settings.pool == "all" and len(heads) > 1:
        raise PlanError("layers of this model have different numbers of key/value heads; give --pool a number.")
    if heads == {1}:
        raise PlanError(
            "layers of this model have one key/value head each: there is none to share with; leave out --pool."
        )
    return max(heads) if settings.pool == "all" else int(settings.pool)


def _numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class Texts(NamedTuple):
    """The rows of a run, as `Workbench` has them."""

    calibration: torch.Tensor
    rehearsal: torch.Tensor
    evaluation: torch.Tensor
    described: str
    truth: torch.Tensor | None
    more: torch.Tensor | None
    long: LongText | None


def read_texts(
    settings: Settings, family: Family, config: Any, tokenizer: Any, task: tasks.Task, model: Any, track: Track
) -> Texts:
    """Cut the text into blocks; `model` is None where it is too large to write any itself."""
    length = min(settings.length, family.longest(config))
    wanted = [max(1, tokens // task.block_tokens(length)) for tokens in (settings.tokens, settings.eval_tokens)]
    source = settings.data or ("stdlib" if settings.model == families.EMBEDDED else "self")
    # A CPU would write for hours what a healing reads.
    writes = "self" not in source or (model is not None and model.device.type == "cuda")
    learns = settings.heal in ("blockwise", "distill") and writes
    asked = Options.parse(settings.heal_options).tokens if learns else None
    extra = max(0, (asked or 0) - settings.tokens) // task.block_tokens(length)
    further = _further(settings, family, config, task, length, wanted[1], settings.eval or source)

    def read(name: str, count: int, seed: int) -> data.Rows:
        if name.endswith("+self"):  # what there is, topped up by the model's own text
            own = read(name.removesuffix("+self"), count, seed).rows
            more = [read("self", count - len(own), seed).rows] if len(own) < count else []
            return data.Rows(torch.cat((own, *more)))
        if name == "self" and model is None:
            raise DataError("a streamed model is too slow to write its own text; give --data FILE (and --eval FILE).")
        if name == "self":
            return data.Rows(processes.agreed(data.written_by(model, count, length, seed, track=track)))
        found = task.read(name, tokenizer, length, count, settings.seed)
        return found._replace(rows=task.complete(model, found.rows, seed, track))

    if settings.eval is not None:
        both, evaluation = (
            read(source, wanted[0] + extra, settings.seed),
            read(settings.eval, wanted[1] + (further or 0), settings.seed + 1),
        )
        calibration, more = both.part(slice(wanted[0])), both.rows[wanted[0] :]
        evaluation, held = evaluation.part(slice(wanted[1])), evaluation.rows
        described = settings.eval
    else:
        both = read(source, sum(wanted) + extra + (further or 0), settings.seed)
        both, more = both.part(slice(sum(wanted))), both.rows[sum(wanted) :]
        more, held = more[:extra], more[extra:]
        if len(both.rows) < 2:
            raise HeadwiseError(f"{source} is enough for one row only; give a longer --data, or --eval.")
        split = max(1, len(both.rows) * wanted[0] // sum(wanted))
        calibration, evaluation = both.part(slice(split)), both.part(slice(split, None))
        described = f"held out from {source}"
        held = torch.cat((evaluation.rows, held))  # none of them calibrates, none is learned from
    rows = calibration.rows
    kept = torch.arange(len(rows)) % 8 != 7  # every eighth row is for the rehearsal
    rehearsal = rows[~kept] if len(rows) >= 8 else rows
    left = more if len(more) else None
    long = None if further is None else _in_one_piece(held, tokenizer)
    return Texts(rows[kept], rehearsal, evaluation.rows, described, evaluation.truth, left, long)


def _further(
    settings: Settings, family: Family, config: Any, task: tasks.Task, length: int, rows: int, source: str
) -> int | None:
    """Rows to read beyond the evaluation's, so that rows of the whole context can be made of them all.

    None where there are no such rows: of models that read no growing text, and of text that a model wrote itself,
    which ends with its row.
    """
    if not task.has_past or source == "self" or source.endswith("+self"):
        return None
    context = settings.served(family.longest(config))
    tokens = lengths.tokens_for(length, context, settings.eval_tokens)
    return max(0, -(-tokens // (length - 1)) + 1 - rows)  # a row may begin with a token that is no text


def _in_one_piece(rows: torch.Tensor, tokenizer: Any) -> LongText:
    found = data.start_of(tokenizer)
    start = found[0] if found else None
    return LongText(lengths.joined(rows, start), start)
