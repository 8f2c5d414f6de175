"""Texts, or pairs of them, with a label or a score: jsonl, or tsv as in GLUE."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.errors import DataError
from headwise.research.train._source import Draws, TrainingRows, surprise
from headwise.research.train.settings import TrainSettings

TEXT = ("text", "sentence", "sentence1", "#1 string", "question", "premise")  # names of columns
PAIR = ("text_pair", "sentence2", "#2 string", "hypothesis")
LABEL = ("label", "quality", "score")
HELD_OUT = 0.1  # of the rows, where none to evaluate on are given
MEANING = 'a .jsonl file with {"text": ..., "label": ...} (and "text_pair") or a .tsv file with such columns'


class Example(NamedTuple):
    """One text or pair with its label as written."""

    text: str
    pair: str | None
    label: str


def is_labelled(source: str) -> bool:
    """Whether a source holds labels, by its name or, for jsonl, its first line."""
    path = Path(source)
    if path.suffix == ".tsv":
        return True
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), "")
        return "label" in json.loads(first)
    except (ValueError, TypeError, RecursionError, OSError):
        return False


def read(source: str) -> list[Example]:
    """All examples of a file."""
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source} does not exist; give {MEANING}.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line breaks may be part of a text
        rows = _records(lines) if path.suffix == ".jsonl" else _columns(lines)
    except (ValueError, AttributeError, RecursionError, OSError) as error:
        raise DataError(f"{source} cannot be read ({error}); give {MEANING}.") from None
    found = []
    for number, row in enumerate(rows, 1):
        parts = [
            next((row[name] for name in names if row.get(name) is not None), None) for names in (TEXT, PAIR, LABEL)
        ]
        if parts[0] is None or parts[2] is None:
            raise DataError(f"{source}, example {number}: no text or no label; give {MEANING}.")
        found.append(Example(str(parts[0]), None if parts[1] is None else str(parts[1]), str(parts[2])))
    if not found:
        raise DataError(f"{source} holds no examples; give {MEANING}.")
    return found


def _records(lines: list[str]) -> list[dict[str, Any]]:
    return [{name.lower(): value for name, value in json.loads(line).items()} for line in lines if line.strip()]


def _columns(lines: list[str]) -> list[dict[str, Any]]:
    """Rows of a tsv file by the names in its first line; where it has none, as CoLA, by their places."""
    table = list(csv.reader((line for line in lines if line.strip()), delimiter="\t", quoting=csv.QUOTE_NONE))
    names = [name.strip().lower() for name in table[0]] if table else []
    if set(names) & set(LABEL) and set(names) & set(TEXT):
        return [dict(zip(names, row, strict=False)) for row in table[1:] if len(row) == len(names)]
    if names and len(names) == 4 and table[0][1] in "01":
        return [{"label": row[1], "text": row[3]} for row in table if len(row) == 4]
    raise ValueError("its first line names no text and label")


class Labels(NamedTuple):
    """What the labels of a data set are: classes by name, or scores."""

    names: tuple[str, ...]  # none: scores

    @classmethod
    def of(cls, examples: Sequence[Example], known: dict[str, int]) -> Labels:
        """Whole numbers and words are classes, in the order that the model knows them in; other numbers are scores."""
        if {example.label for example in examples} == set(known):
            return cls(tuple(sorted(known, key=lambda name: known[name])))
        found = sorted({example.label for example in examples}, key=lambda label: (not label.isdigit(), label.zfill(9)))
        return cls(() if any(_is_score(label) for label in found) else tuple(found))

    def tensor(self, examples: Sequence[Example], source: str) -> torch.Tensor:
        """Class numbers or scores (rows,)."""
        if not self.names:
            return torch.tensor([float(example.label) for example in examples])
        known = {name: number for number, name in enumerate(self.names)}
        if strange := sorted({example.label for example in examples} - set(known)):
            raise DataError(f"{source} has the label '{strange[0]}', which the training data does not have.")
        return torch.tensor([known[example.label] for example in examples])


def _is_score(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return not label.lstrip("-").isdigit()


class LabelledTexts(TrainingRows):
    """Whole texts with one answer each, padded to the longest of a batch."""

    default_rows = 32
    order_on_host = True  # how far a batch is padded must be known there

    def __init__(self, settings: TrainSettings, tokenizer: Any, length: int, device: torch.device, config: Any) -> None:
        self.types = (getattr(config, "type_vocab_size", 0) or 0) > 1  # whether the model tells texts of a pair apart
        examples = read(settings.data)
        if settings.eval is None:
            random.Random(settings.seed).shuffle(examples)
            held = max(1, int(len(examples) * HELD_OUT))
            examples, other = examples[held:], examples[:held]
        else:
            other = read(settings.eval)
        if not examples:
            raise DataError(f"{settings.data} has one example; give more, or others with --eval.")
        self.labels = Labels.of([*examples, *other], config.label2id or {})
        self.device, self.pad = device, tokenizer.pad_token_id or 0
        self.train, self.held = (self._encoded(part, tokenizer, length, settings) for part in (examples, other))
        self.train_rows, self.eval_rows = len(examples), len(other)
        self.row_tokens, self.mean_tokens = int(self.train[1].max()), float(self.train[1].float().mean())

    def _encoded(
        self, examples: list[Example], tokenizer: Any, length: int, settings: TrainSettings
    ) -> tuple[Any, ...]:
        """Rows (N, T), their lengths (N,), token types (N, T) and labels (N,), on the host."""
        texts = [example.text for example in examples]
        pairs = [example.pair or "" for example in examples] if any(e.pair is not None for e in examples) else None
        made = tokenizer(texts, pairs, truncation=True, max_length=length, return_token_type_ids=True, verbose=False)
        lengths = torch.tensor([len(row) for row in made["input_ids"]])
        if not int(lengths.min()):
            raise DataError(f"{settings.data} has an empty text; leave it out.")
        ids, types = (_padded(made[name], pad) for name, pad in (("input_ids", self.pad), ("token_type_ids", 0)))
        return ids, lengths, types, self.labels.tensor(examples, settings.eval or settings.data)

    def take(self, part: Any, rows: torch.Tensor, draws: Draws) -> Any:
        """What the model reads, padded to the longest row, and the labels."""
        ids, lengths, types, labels = (tensor[rows.cpu()] for tensor in part)
        longest = min(ids.shape[1], -(-int(lengths.max()) // 8) * 8)
        mask = (torch.arange(longest) < lengths.unsqueeze(1)).long()
        inputs = {"input_ids": ids[:, :longest], "attention_mask": mask}
        if self.types:
            inputs["token_type_ids"] = types[:, :longest]
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}, labels.to(self.device)

    def scores(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Surprise at the label and whether it was the best, or the squared error of a score."""
        inputs, labels = batch
        logits = model(**inputs).logits
        if not self.labels.names:
            return {"loss": (logits.flatten().float() - labels).square()}
        return {"loss": surprise(logits, labels), "accuracy": (logits.argmax(-1) == labels).float()}


def _padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    """Rows of any length as one tensor."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
