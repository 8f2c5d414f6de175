"""Blockwise healing of a model that is larger than memory: each layer is trained while it is there, after its refit.

It is the training of `heal/blockwise.py`, with streams that wait where the store keeps them. They are others than those
of the refit: its batches are larger, and it reads what the refitted layers before put out, not the trained ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.data import count_tokens
from headwise.errors import HeadwiseError, PlanError
from headwise.families import Block, Family, set_format
from headwise.files.json import read_object
from headwise.heal import blockwise
from headwise.heal._job import Job
from headwise.heal._layer import RATE, LayerBatch, LayerTrainer, checks_of, in_full, mean_of, passed
from headwise.runs.heal_options import Options
from headwise.stream._model import Streamed
from headwise.stream._store import AGAIN, StreamStore
from headwise.tasks.causal import Causal
from headwise.types import Healing, write_atomically

HALVES = ("learned", "held")  # rows to learn from, and rows that show whether it helped


class LayerTraining:
    """Trains layer after layer of a build; `store` keeps its streams beside those of the refit."""

    def __init__(
        self, source: Streamed, reader: Family, rows: torch.Tensor, options: Options, seed: int, store: StreamStore
    ) -> None:
        self.source, self.options, self.seed, self.store = source, options, seed, store
        self.device = torch.device(source.device)
        prepared = Causal().prepare(rows, seed)
        size = blockwise.batch_tokens(options, self.device)
        learned, held_out = blockwise.halves(prepared, len(rows))
        self.parts = dict(zip(HALVES, (learned.batches(size), held_out.batches(size)), strict=True))
        self.contexts = {half: source.contexts([p.inputs for p in parts], reader) for half, parts in self.parts.items()}
        self.steps = options.steps or blockwise.PASSES * len(self.parts["learned"])
        self.tokens = count_tokens(rows)
        self.job = Job(reader, Causal(), source.model, source.model, prepared, prepared, seed, options=options)

    @staticmethod
    def key(options: Options | None) -> dict[str, Any] | None:
        """What stands for the training in the key of a store."""
        return None if options is None else asdict(options)

    def _names(self) -> list[tuple[str, int]]:
        return [(half, number) for half, parts in self.parts.items() for number in range(len(parts))]

    def begin(self) -> None:
        """Put both models' streams before the first layer."""
        for half, number in self._names():
            for side in ("whole", "trained"):
                self.store.put(0, f"{side}.{half}.{number}", self.source.embed(self.parts[half][number].inputs))

    def train(self, index: int, theirs: Block, layer: nn.Module, ours: Block, record: Path) -> None:
        """Train a layer in place, write its errors, and take both streams past it."""
        for half, number in self._names():
            name, context = f"{half}.{number}", self.contexts[half][number][index]
            middle, target = passed(theirs, self.store.get(index, f"whole.{name}"), context)
            self.store.put(index, f"middle.{name}", middle)
            self.store.put(index + 1, f"whole.{name}", target)
        set_format(layer, torch.float32)  # steps are smaller than bfloat16 resolves
        try:
            with torch.enable_grad():
                trainer = self._trainer(index, layer, ours)
                errors = trainer.train(range(self.steps), self.steps, self.options.rate or RATE, self.seed + index)
        except torch.OutOfMemoryError:
            size = blockwise.batch_tokens(self.options, self.device)
            raise HeadwiseError(
                f"the device has too little memory to train layers; add --heal-option batch={max(1, size // 4)}."
            ) from None
        write_atomically(record, json.dumps({"errors": errors}))
        set_format(layer, self.source.dtype)
        for half, number in self._names():
            name = f"trained.{half}.{number}"
            self.store.put(index + 1, name, ours(self.store.get(index, name), self.contexts[half][number][index]))

    @torch.no_grad()
    def _power(self, index: int) -> float:
        """The mean square of what the source's layer changes."""
        names = [f"whole.held.{number}" for number in range(len(self.parts["held"]))]
        return mean_of((self.store.get(index + 1, name) - self.store.get(index, name)).square() for name in names)

    def _trainer(self, index: int, layer: nn.Module, ours: Block) -> LayerTrainer:
        learned, held_out = (_Batches(self, index, half) for half in HALVES)
        last, captured = index == len(self.source.layers) - 1, blockwise.captures(self.device, self.steps)
        return blockwise.trainer_of(self.job, layer, ours, (learned, held_out), self._power(index), last, captured)

    def healing(self, records: Sequence[Path]) -> Healing:
        """What the training did, from what was written of every layer."""
        checks = checks_of(range(self.steps))
        return blockwise.record(self.tokens, checks, [_errors(path, len(checks)) for path in records])


class _Batches(Sequence[LayerBatch]):
    """The batches of one half before a layer, each read when it is asked for."""

    def __init__(self, owner: LayerTraining, index: int, half: str) -> None:
        self.owner, self.layer, self.half = owner, index, half

    def __len__(self) -> int:
        return len(self.owner.parts[self.half])

    def __getitem__(self, number: Any) -> Any:
        owner, index, name = self.owner, self.layer, f"{self.half}.{number}"
        rows, context = owner.parts[self.half][number], owner.contexts[self.half][number][index]
        places = ((index, f"trained.{name}"), (index + 1, f"whole.{name}"), (index, f"middle.{name}"))
        cut, target, middle = (in_full(owner.store.get(*place)) for place in places)
        return LayerBatch(rows.to(owner.device), cut, target, middle, in_full(context))


def _errors(path: Path, count: int) -> list[float]:
    """The errors of a layer at every check."""
    found = read_object(path, advice=AGAIN).get("errors")
    if not isinstance(found, list) or len(found) != count or not all(type(value) is float for value in found):
        raise PlanError(f"{path} does not hold the errors of a layer's training; {AGAIN}.")
    return found
