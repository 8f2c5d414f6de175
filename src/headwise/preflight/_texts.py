"""Checks of what a run will read: is it there and readable, is it long enough, does evaluation repeat calibration?"""

from pathlib import Path
from typing import Any

from headwise import data, families
from headwise.data import audio, images, overlap, own_text
from headwise.families import Family
from headwise.registry import find
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.stages.texts import one_row, shared_lines, sources
from headwise.stream.source import writes_whole

USUAL, DENSE = 3.5, 2.0  # bytes of text for a token: usually, and at the very least of a whole text
PACKED = 10  # bytes of text for a byte of a compressed file, at most
MOSTLY = 0.5  # share of lines that are repeated in a text worth a note
SURE = 16  # bytes for every token that is needed: so much text is long enough by any tokenizer


def check(settings: Settings, family: Family, config: Any, task: str, length: int, streamed: bool = False) -> list[str]:
    """Notes about the texts, images or recordings of a run; what cannot be read raises."""
    notes: list[str] = []
    for name in sources(settings):
        if own_text.writes_itself(name):
            own_text.refuse_to_write(family.class_name(config) or family.name, config, family.audio, task == "causal")
            if streamed and not writes_whole(settings):
                raise own_text.too_slow_to_write()
        if (source := name.removesuffix("+self")) == "self":
            continue
        if family.images:
            images.peek(source)
        elif family.audio:
            audio.peek(source)
        else:
            data.peek(source)
            notes += _too_few(settings, family, config, task, length, name)
    if shared := overlap.in_words(shared_lines(settings)):
        notes.append(f"--eval {settings.eval}: {shared}, so the quality measured on it is flattered.")
    return notes if family.images or family.audio or settings.eval else [*notes, *_repeats(settings)]


def _repeats(settings: Settings) -> list[str]:
    """A note for a text that repeats itself: what is held out of it for the evaluation was calibrated on, too."""
    source = (settings.data or "self").removesuffix("+self")
    found = overlap.repeated(source, settings.tokens + settings.eval_tokens, settings.seed)
    if found is None or found < MOSTLY:
        return []
    often = (
        f"{found:.0%} of the lines of {source} occur more than once, so the text that is held out for the evaluation"
    )
    return [f"{often} is partly calibration text; give another text with --eval."]


def _too_few(settings: Settings, family: Family, config: Any, task: str, length: int, name: str) -> list[str]:
    """A note for a file that has far fewer tokens than wanted; an error for one that is too short to be split."""
    if not (files := data.text_files(Path(source := name.removesuffix("+self")))):
        return []
    size = sum(file.stat().st_size * (PACKED if file.suffix in data.OPENERS else 1) for file in files)
    alone = settings.eval is None and name == source  # calibrated and judged on
    rows = 2 if alone else 1
    if size < SURE * rows * length:
        _two_rows(settings, config, task, length, source, rows)
    asked = settings.eval_tokens
    if name != settings.eval:
        healing = Options.parse(settings.heal_options).tokens or 0
        asked = max(settings.tokens, healing) + (settings.eval_tokens if alone else 0)
    if name != source or size / DENSE >= asked:
        return []
    return [f"{source} has about {size / USUAL:,.0f} tokens by its size, and {asked:,} are asked for."]


def _two_rows(settings: Settings, config: Any, task: str, length: int, source: str, rows: int) -> None:
    """Refuse a short text that does not make the rows that are needed."""
    with families.explained(settings.model), families.quietly():
        tokenizer = families.tokenizer_of(settings.model, settings.trust_remote_code)
    kind = find("headwise.tasks", task).TASK.for_model(config, tokenizer, settings.model)
    if len(kind.read(source, tokenizer, length, rows, settings.seed).rows) < rows:
        raise one_row(source)
