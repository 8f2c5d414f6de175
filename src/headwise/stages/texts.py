"""The rows of a run: text, images or recordings, read and split into calibration, rehearsal and evaluation."""

from typing import Any, NamedTuple

import torch

from headwise import data, families, processes, progress, tasks
from headwise.checks import _lengths as lengths
from headwise.data import overlap, own_text, split
from headwise.errors import DataError
from headwise.families import Family
from headwise.progress import Track
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings


class LongText(NamedTuple):
    """Held-out tokens (N) in one piece, from which rows of any length can be cut; as many as wanted, or fewer."""

    tokens: torch.Tensor
    start: int | None  # the token that begins every row, where there is one


class RunRows(NamedTuple):
    """The rows of a run. No row serves two purposes."""

    calibration: torch.Tensor
    rehearsal: torch.Tensor  # of the calibration's source, kept from every fit: predicts the damage before evaluation
    evaluation: torch.Tensor
    described: str  # where the evaluation comes from
    truth: torch.Tensor | None  # the right answers to the evaluation, where they are known
    more: torch.Tensor | None  # of the calibration's source, for a healing that reads more
    long: LongText | None  # held-out text, for rows of any length


class RowReader(NamedTuple):
    """Reads rows of one length; `model` is None where it is too large to write text itself."""

    task: tasks.Task
    tokenizer: Any
    length: int
    model: Any
    seed: int
    track: Track

    def rows(self, name: str, count: int, seed: int) -> data.DataRows:
        """At most `count` rows of a source; `NAME+self` is topped up with text that the model writes."""
        if name.endswith("+self"):
            own = self.rows(name.removesuffix("+self"), count, seed).rows
            more = [self.rows("self", count - len(own), seed).rows] if len(own) < count else []
            return data.DataRows(torch.cat((own, *more)))
        if name == "self" and self.model is None:
            raise own_text.too_slow_to_write()
        if name == "self":
            written = own_text.written_by(self.model, count, self.length, seed, track=self.track)
            return data.DataRows(processes.agreed(written))
        found = self.task.read(name, self.tokenizer, self.length, count, self.seed)
        return found._replace(rows=self.task.complete(self.model, found.rows, seed, self.track))


def read_texts(
    settings: Settings, family: Family, config: Any, tokenizer: Any, task: tasks.Task, model: Any, track: Track
) -> RunRows:
    """Read and split the rows of a run; `model` is None where it is too large to write text itself."""
    context = settings.served(family.longest(config))
    length = family.row_length(settings.length, context)
    source = calibration_source(settings)
    quick = model is not None and model.device.type == "cuda"
    healing = healing_tokens(settings, source, quick)
    block = task.block_tokens(length)
    wanted = split.Counts(
        calibration=max(1, settings.tokens // block),
        evaluation=max(1, settings.eval_tokens // block),
        more=max(0, healing - settings.tokens) // block,
    )
    grows = task.has_past and not own_text.writes_itself(settings.eval or source)
    if grows:
        tokens = lengths.tokens_for(length, context, settings.eval_tokens)
        rows = -(-tokens // (length - 1)) + 1  # a row may begin with a token that is no text
        wanted = wanted._replace(longer=max(0, rows - wanted.evaluation))
    found = _read(settings, RowReader(task, tokenizer, length, model, settings.seed, track), source, wanted)
    _note_missing(settings, task, found, wanted, healing)
    for rows_of_part in (found.calibration.rows, found.evaluation.rows, found.more):
        _refuse_unknown_tokens(rows_of_part, config)
    _refuse_other_inputs(found.calibration.rows, family, task, model)
    return RunRows(
        *split.rehearsed(found.calibration.rows),
        found.evaluation.rows,
        described(settings, source),
        found.evaluation.truth,
        found.more if len(found.more) else None,
        _in_one_piece(found.held_out, tokenizer) if grows else None,
    )


def _read(settings: Settings, reader: RowReader, source: str, wanted: split.Counts) -> split.Split:
    fitted = wanted.calibration + wanted.more
    if settings.eval is not None:
        both = reader.rows(source, fitted, settings.seed)
        return split.two_sources(both, reader.rows(settings.eval, wanted.held_out, settings.seed + 1), wanted)
    both = reader.rows(source, fitted + wanted.held_out, settings.seed)
    if len(both.rows) < 2:
        raise one_row(source)
    return split.one_source(both, wanted)


def described(settings: Settings, source: str) -> str:
    """Where the evaluation comes from, in words."""
    if settings.eval is None:
        return f"held out from {source}"
    shared = overlap.in_words(shared_lines(settings))
    return f"{settings.eval} ({shared})" if shared else settings.eval


def calibration_source(settings: Settings) -> str:
    """Where calibration text comes from: --data, else the standard library or text that the model writes."""
    return settings.data or ("stdlib" if settings.model == families.EMBEDDED else "self")


def sources(settings: Settings) -> tuple[str, ...]:
    """What a run reads, each source once."""
    return tuple(dict.fromkeys((calibration_source(settings), *([settings.eval] if settings.eval else []))))


def shared_lines(settings: Settings) -> float | None:
    """The share of the evaluation's lines that are in the calibration text too; None where it is not known."""
    if settings.eval is None:
        return None
    read = max(settings.tokens, Options.parse(settings.heal_options).tokens or 0)
    return overlap.share(calibration_source(settings), settings.eval, read, settings.eval_tokens, settings.seed)


def healing_tokens(settings: Settings, source: str, quick: bool) -> int:
    """Tokens that the healing should read beyond the calibration; 0 where the model would write them on a CPU."""
    wanted = Options.parse(settings.heal_options).tokens or 0
    if settings.heal not in ("blockwise", "distill") or wanted <= settings.tokens:
        return 0
    if own_text.writes_itself(source) and not quick:
        progress.note(
            f"a CPU would write {wanted:,} tokens of its own text for hours; the healing reads the calibration's "
            "again. Give --data FILE to let it read more."
        )
        return 0
    return wanted


def one_row(source: str) -> DataError:
    """The error for a text that is too short to be split."""
    return DataError(f"{source} is enough for one row only; give a longer --data, a smaller --length, or --eval.")


def _note_missing(settings: Settings, task: tasks.Task, found: split.Split, wanted: split.Counts, healing: int) -> None:
    """A note for every part that has fewer rows than wanted."""
    row = task.row_tokens
    had = [data.count_tokens(rows, row) for rows in (found.calibration.rows, found.evaluation.rows, found.more)]
    for name, short, tokens, asked in (
        ("calibration", len(found.calibration.rows) < wanted.calibration, had[0], settings.tokens),
        ("evaluation", len(found.evaluation.rows) < wanted.evaluation, had[1], settings.eval_tokens),
        ("healing", len(found.more) < wanted.more, had[0] + had[2], healing),
    ):
        if short:
            progress.note(f"{name} has {tokens:,} of {asked:,} tokens asked for.")


def _refuse_unknown_tokens(rows: torch.Tensor, config: Any) -> None:
    """Refuse a tokenizer of another model: it gives numbers for which this model has no embedding."""
    known = getattr(config, "vocab_size", None)
    if known and not rows.is_floating_point() and rows.numel() and (most := int(rows.max())) >= known:
        raise DataError(
            f"the tokenizer gives token {most:,} and the model knows {known:,}; put its own tokenizer beside it."
        )


@torch.no_grad()
def _refuse_other_inputs(rows: torch.Tensor, family: Family, task: tasks.Task, model: Any) -> None:
    """Refuse a processor of another model: one of its images or recordings is tried."""
    if not (family.images or family.audio) or not len(rows):
        return
    try:
        family.call(model, data.batches(rows[:1], row=task.row_tokens)[0].to(model.device))
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"the model does not take inputs as its processor makes them ({error}); put the model's own processor "
            "configuration beside it."
        ) from None


def _in_one_piece(rows: torch.Tensor, tokenizer: Any) -> LongText:
    found = data.start_of(tokenizer)
    start = found[0] if found else None
    return LongText(lengths.joined(rows, start), start)
