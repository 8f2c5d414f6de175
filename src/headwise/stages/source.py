"""What every stage works with: the model on our modules, and the rows that it is calibrated and judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import data, families, processes, progress, tasks
from headwise.checks import _lengths as lengths
from headwise.data import overlap, own_text
from headwise.errors import DataError, PlanError
from headwise.families import Family
from headwise.heal._job import Job
from headwise.memory import fits
from headwise.progress import Track, silently, stage
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.tasks.causal import Causal
from headwise.types import ModelShape


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
    context: int = 0  # tokens that will be served

    def reader(self, seed: int) -> Family:
        """The family as calibration reads with it: rows begin at positions all over the context that is served."""
        return self.family.offset(self.context, seed)

    def inputs(self, tokens: torch.Tensor, seed: int) -> torch.Tensor:
        """Blocks of text as the model reads them in its task."""
        return self.task.prepare(tokens, seed).inputs

    def job(self, settings: Settings, cut: nn.Module, track: Track = silently, folder: Path | None = None) -> Job:
        """What there is to heal of a cut model; `folder` keeps work that takes long."""
        text, held = (self.task.prepare(rows, settings.seed) for rows in (self.calibration, self.rehearsal))
        options = Options.parse(settings.heal_options)
        more = None if self.more is None else self.task.prepare(self.more, settings.seed)
        return Job(
            self.reader(settings.seed),
            self.task,
            self.source,
            cut,
            text,
            held,
            settings.seed,
            track,
            folder,
            options,
            more,
        )


def workbench(settings: Settings, track: Track = silently) -> Workbench:
    """Load the model and cut the text into blocks; calibration and evaluation never share a block."""
    device = processes.begin(settings.device)
    with stage(track, "loading the model"):
        model, tokenizer = families.load(settings.model, "cpu", settings.trust_remote_code, settings.task)
    alone = settings.device == "auto" and device == "cuda" and processes.count() == 1
    large = alone and not fits(_numbers(model), device)
    model = model if large else model.to(device)  # a large one stays in host memory, and is lent the GPUs
    task = tasks.of(model, tokenizer, settings.model)
    family = families.family_of(model.config)
    refuse_units(settings, family)
    texts = read_texts(settings, family, model.config, tokenizer, task, model, track)
    bench = Workbench(family, family.tailor(model, pooled_heads(settings, family, model)), tokenizer, *texts[:4])
    context = settings.served(family.longest(model.config))
    bench = bench._replace(task=task, truth=texts.truth, more=texts.more, spread=large, long=texts.long)
    return bench._replace(context=context)


def refuse_units(settings: Settings, family: Family) -> None:
    """What models of a family cannot lose."""
    if lost := sorted(set(settings.allow) - {*family.units, "depth"}):
        known = ", ".join((*family.units, "depth"))
        raise PlanError(f"{family.name} models cannot lose {lost[0]}; --allow takes, of these models: {known}.")


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
    long: LongText | None


def _refuse_unknown_tokens(rows: torch.Tensor, config: Any) -> None:
    """A tokenizer that belongs to another model gives numbers that this one has no row for."""
    known = getattr(config, "vocab_size", None)
    if known and not rows.is_floating_point() and rows.numel() and (most := int(rows.max())) >= known:
        raise DataError(
            f"the tokenizer gives token {most:,} and the model knows {known:,}; put its own tokenizer beside it."
        )


@torch.no_grad()
def _refuse_other_inputs(rows: torch.Tensor, family: Family, task: tasks.Task, model: Any) -> None:
    """A processor of another model makes images or recordings that this one may not take: one is tried."""
    if not (family.images or family.audio) or not len(rows):
        return
    try:
        family.call(model, data.batches(rows[:1], row=task.row_tokens)[0].to(model.device))
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"the model does not take inputs as its processor makes them ({error}); put the model's own processor "
            "configuration beside it."
        ) from None


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
    if own_text.writes_itself(source) and not quick:
        progress.note(
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
            progress.note(f"{name} has {data.count_tokens(rows, task.row_tokens):,} of {asked:,} tokens asked for.")


def read_texts(
    settings: Settings, family: Family, config: Any, tokenizer: Any, task: tasks.Task, model: Any, track: Track
) -> Texts:
    """Cut the text into blocks; `model` is None where it is too large to write any itself."""
    length = family.row_length(settings.length, settings.served(family.longest(config)))
    wanted = [max(1, tokens // task.block_tokens(length)) for tokens in (settings.tokens, settings.eval_tokens)]
    source = calibration_source(settings)
    asked = healing_tokens(settings, source, model is not None and model.device.type == "cuda")
    extra = max(0, asked - settings.tokens) // task.block_tokens(length)
    further = _further(settings, family, config, task, length, wanted[1], settings.eval or source)

    def read(name: str, count: int, seed: int) -> data.DataRows:
        if name.endswith("+self"):  # what there is, topped up by the model's own text
            own = read(name.removesuffix("+self"), count, seed).rows
            more = [read("self", count - len(own), seed).rows] if len(own) < count else []
            return data.DataRows(torch.cat((own, *more)))
        if name == "self" and model is None:
            raise own_text.too_slow_to_write()
        if name == "self":
            return data.DataRows(processes.agreed(own_text.written_by(model, count, length, seed, track=track)))
        found = task.read(name, tokenizer, length, count, settings.seed)
        return found._replace(rows=task.complete(model, found.rows, seed, track))

    if settings.eval is not None:
        both, evaluation = (
            read(source, wanted[0] + extra, settings.seed),
            read(settings.eval, wanted[1] + (further or 0), settings.seed + 1),
        )
        calibration, more = both.part(slice(wanted[0])), both.rows[wanted[0] :]
        evaluation, held = evaluation.part(slice(wanted[1])), evaluation.rows
        shared = overlap.in_words(shared_lines(settings))
        described = f"{settings.eval} ({shared})" if shared else settings.eval
    else:
        both = read(source, sum(wanted) + extra + (further or 0), settings.seed)
        both, more = both.part(slice(sum(wanted))), both.rows[sum(wanted) :]
        more, held = more[:extra], more[extra:]
        if len(both.rows) < 2:
            raise one_row(source)
        split = max(1, len(both.rows) * wanted[0] // sum(wanted))
        calibration, evaluation = both.part(slice(split)), both.part(slice(split, None))
        described = f"held out from {source}"
        held = torch.cat((evaluation.rows, held))  # none of them calibrates, none is learned from
    _tell_what_lacks(settings, task, calibration.rows, evaluation.rows, wanted)
    if len(more) < extra:
        had = data.count_tokens(calibration.rows, task.row_tokens) + data.count_tokens(more, task.row_tokens)
        progress.note(f"healing has {had:,} of {asked:,} tokens asked for.")
    rows = calibration.rows
    kept = torch.arange(len(rows)) % 8 != 7  # every eighth row is for the rehearsal
    rehearsal = rows[~kept] if len(rows) >= 8 else rows
    left = more if len(more) else None
    for read_rows in (rows, evaluation.rows, more):
        _refuse_unknown_tokens(read_rows, config)
    _refuse_other_inputs(rows, family, task, model)
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
