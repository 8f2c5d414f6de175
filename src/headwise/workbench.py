"""What every stage works with: the model on our modules, and the rows that it is calibrated and judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import bars, data, families, overlap, processes, tasks
from headwise.errors import DataError, PlanError
from headwise.families import Family
from headwise.heal._job import Job
from headwise.heal._options import Options
from headwise.memory import fits
from headwise.probes._watch import Track, silently, stage
from headwise.runfolder import Settings
from headwise.tasks.causal import Causal
from headwise.types import ModelShape


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
    with stage(track, "loading the model"):
        model, tokenizer = families.load(settings.model, "cpu", settings.trust_remote_code, settings.task)
    alone = settings.device == "auto" and device == "cuda" and processes.count() == 1
    large = alone and not fits(_numbers(model), device)
    model = model if large else model.to(device)  # a large one stays in host memory, and is lent the GPUs
    task = tasks.of(model, tokenizer, settings.model)
    refuse_bound(settings, task)
    family = families.family_of(model.config)
    refuse_units(settings, family)
    texts = read_texts(settings, family, model.config, tokenizer, task, model, track)
    bench = Workbench(family, family.tailor(model, pooled_heads(settings, family, model)), tokenizer, *texts[:4])
    return bench._replace(task=task, truth=texts.truth, more=texts.more, spread=large)


def refuse_units(settings: Settings, family: Family) -> None:
    """What models of a family cannot lose."""
    if lost := sorted(set(settings.allow) - {*family.units, "depth"}):
        known = ", ".join((*family.units, "depth"))
        raise PlanError(f"{family.name} models cannot lose {lost[0]}; --allow takes, of these models: {known}.")


def refuse_bound(settings: Settings, task: tasks.Task | type[tasks.Task]) -> None:
    """A strategy that needs a past."""
    if settings.strategy == "bound" and not task.has_past:
        raise PlanError("strategy bound reckons with how far back a text is read, which no encoder has; use exact.")


def pooled_heads(settings: Settings, family: Family, model: nn.Module) -> int:
    """How many key/value heads are to share a cached row; of a model whose heads do so already, no more."""
    heads = heads_to_pool(settings, family.shape_of(model.config))
    if heads > 1 and any(name.endswith("pairs_GP") for name, _ in model.named_buffers()):
        raise PlanError("queries and keys of this model are cut already; leave out --pool, or pool its source's heads.")
    return heads


def heads_to_pool(settings: Settings, shape: ModelShape) -> int:
    """The same as far as the shape tells: rotary pairs that are gone are seen in the model alone."""
    if pooled := any(layer.pooled > 1 for layer in shape.layers):
        settings.refuse_to_pool()
    if settings.pool == "none":
        return 1
    if pooled:
        raise PlanError("heads of this model share rows already; leave out --pool, or pool those of its source.")
    if any(layer.projected for layer in shape.layers):
        raise PlanError("queries and keys of this model are cut already; leave out --pool, or pool its source's heads.")
    if not shape.cached or any(layer.role for layer in shape.layers):
        raise PlanError(f"only decoders have a cache whose rows heads can share; leave out --pool for {shape.family}.")
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


def calibration_source(settings: Settings) -> str:
    """Where calibration text comes from, unless told otherwise."""
    return settings.data or ("stdlib" if settings.model == families.EMBEDDED else "self")


def shared_lines(settings: Settings) -> float | None:
    """The share of the evaluation's lines that are in the calibration text too; None where it cannot be told."""
    if settings.eval is None:
        return None
    read = max(settings.tokens, Options.parse(settings.heal_options).tokens or 0)
    return overlap.share(calibration_source(settings), settings.eval, read, settings.eval_tokens, settings.seed)


def healing_tokens(settings: Settings, source: str, quick: bool) -> int:
    """Tokens that a healing was asked to read; a model writes them itself only where it is quick, on a GPU."""
    asked = Options.parse(settings.heal_options).tokens or 0
    if settings.heal not in ("blockwise", "distill") or asked <= settings.tokens:
        return 0
    if data.writes_itself(source) and not quick:
        bars.note(
            f"a CPU would write {asked:,} tokens of its own text for hours; the healing reads the calibration's again. "
            "Give --data FILE to let it read more."
        )
        return 0
    return asked


def one_row(source: str) -> DataError:
    """The error for a text that cannot be calibrated and judged on."""
    return DataError(f"{source} is enough for one row only; give a longer --data, a smaller --length, or --eval.")


def _tell_what_lacks(
    settings: Settings,
    task: tasks.Task,
    calibration: torch.Tensor,
    evaluation: torch.Tensor,
    wanted: list[int],
) -> None:
    """A note for every text that has fewer rows than were asked for."""
    for name, rows, count, asked in (
        ("calibration", calibration, wanted[0], settings.tokens),
        ("evaluation", evaluation, wanted[1], settings.eval_tokens),
    ):
        if len(rows) < count:
            bars.note(f"{name} has {data.count_tokens(rows, task.row_tokens):,} of {asked:,} tokens asked for.")


def read_texts(
    settings: Settings, family: Family, config: Any, tokenizer: Any, task: tasks.Task, model: Any, track: Track
) -> Texts:
    """Cut the text into blocks; `model` is None where it is too large to write any itself."""
    length = min(settings.length, family.longest(config))
    wanted = [max(1, tokens // task.block_tokens(length)) for tokens in (settings.tokens, settings.eval_tokens)]
    source = calibration_source(settings)
    asked = healing_tokens(settings, source, model is not None and model.device.type == "cuda")
    extra = max(0, asked - settings.tokens) // task.block_tokens(length)

    def read(name: str, count: int, seed: int) -> data.Rows:
        if name.endswith("+self"):  # what there is, topped up by the model's own text
            own = read(name.removesuffix("+self"), count, seed).rows
            more = [read("self", count - len(own), seed).rows] if len(own) < count else []
            return data.Rows(torch.cat((own, *more)))
        if name == "self" and model is None:
            raise data.too_slow_to_write()
        if name == "self":
            return data.Rows(processes.agreed(data.written_by(model, count, length, seed, track=track)))
        found = task.read(name, tokenizer, length, count, settings.seed)
        return found._replace(rows=task.complete(model, found.rows, seed, track))

    if settings.eval is not None:
        both, evaluation = (
            read(source, wanted[0] + extra, settings.seed),
            read(settings.eval, wanted[1], settings.seed + 1),
        )
        calibration, more = both.part(slice(wanted[0])), both.rows[wanted[0] :]
        shared = overlap.in_words(shared_lines(settings))
        described = f"{settings.eval} ({shared})" if shared else settings.eval
    else:
        both = read(source, sum(wanted) + extra, settings.seed)
        both, more = both.part(slice(sum(wanted))), both.rows[sum(wanted) :]
        if len(both.rows) < 2:
            raise one_row(source)
        split = max(1, len(both.rows) * wanted[0] // sum(wanted))
        calibration, evaluation = both.part(slice(split)), both.part(slice(split, None))
        described = f"held out from {source}"
    _tell_what_lacks(settings, task, calibration.rows, evaluation.rows, wanted)
    if len(more) < extra:
        had = data.count_tokens(calibration.rows, task.row_tokens) + data.count_tokens(more, task.row_tokens)
        bars.note(f"healing has {had:,} of {asked:,} tokens asked for.")
    rows = calibration.rows
    kept = torch.arange(len(rows)) % 8 != 7  # every eighth row is for the rehearsal
    rehearsal = rows[~kept] if len(rows) >= 8 else rows
    left = more if len(more) else None
    return Texts(rows[kept], rehearsal, evaluation.rows, described, evaluation.truth, left)
