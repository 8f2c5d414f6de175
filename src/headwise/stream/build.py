"""Reshaping, healing and saving a model that is larger than memory: one layer is read, cut, healed and written.

The model grows file by file in the run folder and is renamed when it is whole. A build that was killed resumes behind
the last layer that was written.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from headwise import families, heal, strategies
from headwise.cuts import cut_layer
from headwise.cuts._save import add_code
from headwise.cuts._weights import weight_moments
from headwise.cuts.balance import balance
from headwise.data import batches, count_tokens, places
from headwise.errors import HeadwiseError, PlanError
from headwise.files import tensors
from headwise.files.disk import explained, install
from headwise.files.json import read_object
from headwise.heal import blockwise
from headwise.heal._job import Job
from headwise.heal._layer import RATE, checks_of
from headwise.heal._layer_refit import LayerRefit, RefitBatch
from headwise.memory import available_bytes, emptied
from headwise.progress import Track, silently
from headwise.runs.heal_options import Options
from headwise.runs.moments import read_layer
from headwise.stream._checkpoint import INDEX
from headwise.stream._model import EmptyModel, Streamed, Tensors
from headwise.stream._store import AGAIN, StreamStore, checksum, read_stream, write_stream, write_tensors
from headwise.stream.probe import moments_file
from headwise.tasks.causal import Causal
from headwise.types import Healing, Plan, write_atomically

# What a refit changes of what a cut may share.
REFITTED = ("v.weight", "v.bias", "o.weight", "gate.weight", "up.weight", "down.weight")


class _RowsElsewhere:
    """One batch on its way through both models, as the refit wants it; tensors wait on disk, or in host memory."""

    KEPT = ("source", "cut", "source_z", "z", "source_middle", "source_end", "cut_middle", "channels")

    def __init__(self, folder: Path | None, source: torch.Tensor, cut: torch.Tensor, context: dict[str, Any]) -> None:
        """Without a folder all waits in host memory."""
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        self.__dict__.update(folder=folder, contexts=[context], device=source.device, waiting={})
        self.source, self.cut = source, cut

    def __getattr__(self, name: str) -> Any:
        if name not in self.KEPT:
            raise AttributeError(name)
        if self.folder is None:
            stream = self.waiting.get(name)
            return None if stream is None else stream.to(self.device)
        path = self.folder / f"{name}.safetensors"
        return read_stream(path, self.device) if path.exists() else None

    def __setattr__(self, name: str, stream: torch.Tensor | None) -> None:
        if self.folder is None:
            self.waiting[name] = None if stream is None else stream.detach().cpu()
        elif stream is None:
            (self.folder / f"{name}.safetensors").unlink(missing_ok=True)
        else:
            write_stream(self.folder / f"{name}.safetensors", stream)


class StreamedBuild:
    """A model on its way from a source and a plan to a folder."""

    def __init__(
        self,
        source: Streamed,
        plan: Plan,
        folder: Path,
        rows: torch.Tensor | None,
        seed: int = 0,
        options: Options | None = None,
        trains: bool = False,
    ) -> None:
        """Layers are refitted on `rows` and, where `trains`, trained after it."""
        if source.shape.layers != plan.source.layers:
            raise PlanError("this plan was made for a model with other sizes; allocate again for this one.")
        if plan.portable or any(layer.gone for layer in plan.target.layers):
            raise PlanError("a streamed model can lose no whole layers and has no portable form; allocate without.")
        self.source, self.plan = source, plan
        self.reader = source.family.offset(plan.context, seed)
        self.frame = EmptyModel(source.family, source.family.frame(source.model, plan.target.layers), source.device)
        self.moments, self.work = folder, folder / "build"
        self.parts, self.tokens = ([], 0) if rows is None else (batches(rows), places(rows))
        options = options or Options()
        self.strength = options.ridge or Causal.refit_strength  # of the pull towards the weights that a cut left
        key = {"plan": plan.to_json(), "rows": None if rows is None else checksum(rows), "strength": self.strength}
        key |= {"seed": seed, "training": asdict(options) if trains else None}
        self.store = StreamStore(self.work, key, source.device)
        self.training = None if rows is None or not trains else self._training(rows, options, seed)
        self.seconds = 0.0  # of training
        emptied()
        self.place = self._place()
        large = dict.fromkeys((source.table, source.head))  # once where they are tied
        self.outside = [*([name] for name in large), [name for name in source.outside() if name not in large]]
        self.files = len(self.outside) + len(source.layers)

    def _training(self, rows: torch.Tensor, options: Options, seed: int) -> blockwise.LayerWalk:
        """The training of `heal/blockwise.py`, with streams that wait where the store keeps them.

        They are others than those of the refit: its batches are larger, and it reads what the refitted layers before
        put out, not the trained ones.
        """
        source, text = self.source, Causal().prepare(rows, seed)
        job = Job(self.reader, Causal(), source.model, source.model, text, text, seed, options=options)
        contexts = partial(source.contexts, reader=self.reader)
        halves = blockwise.halves(text, len(rows))
        return blockwise.LayerWalk(job, torch.device(source.device), halves, contexts, self.store)

    def _refit_bytes(self) -> int:
        """What the rows of a refit take while a layer is worked on, at most."""
        shape = self.source.shape
        wide = max(layer.mlp_width + layer.query_heads * layer.out_dim for layer in shape.layers)
        return self.tokens * (8 * shape.hidden_size + 2 * wide) * self.source.dtype.itemsize

    def _place(self) -> str:
        """Where the rows of a refit wait: where there is room. Without a GPU the host's memory is scarce."""
        for place in (self.source.device, "cpu") if self.source.device != "cpu" else ():
            if self._refit_bytes() <= available_bytes(place) // 2:
                return place
        return "disk"

    def _shard(self, number: int) -> Path:
        return self.work / "model" / f"model-{number + 1:05d}-of-{self.files:05d}.safetensors"

    def run(self, folder: Path, track: Track = silently) -> Healing:
        """Cut, heal and write the layers of the model for `folder` that are not there yet; returns what healing did."""
        began = time.perf_counter()
        source, position = self.source, self.store.position()
        if position is not None and not self._shard(0).exists() and not self.installed(folder):
            self.store.restart()
        contexts = source.contexts(self.parts, self.reader)
        label = "blockwise" if self.training else "refit" if self.parts else "reshape"
        for index in self.store.walk(len(source.layers), self._begin, track, label):
            tensors = self._layer(index, [context[index] for context in contexts])
            shard = {name: self._stored(tensors.pop(name)) for name in list(tensors)}
            write_tensors(self._shard(len(self.outside) + index), shard)
        if not self.parts:
            return Healing("none")
        layers = range(len(source.layers))
        gains = [read_object(self._gain(index), advice=AGAIN) for index in layers]
        found = {"method": "refit", "tokens": self.tokens, "strength": self.strength, "layers": gains}
        took = time.perf_counter() - began - self.seconds
        records = [replace(Healing.from_json(found), seconds=took, kept=True)]
        if self.training is not None:
            steps = checks_of(range(self._steps(self.training)))
            errors = [_errors(self._errors_file(index), len(steps)) for index in layers]
            trained = blockwise.record(count_tokens(self.training.job.calibration.inputs), steps, errors)
            records.append(replace(trained, seconds=self.seconds, kept=True))
        return heal.joined(records)

    def _begin(self) -> None:
        """Copy what belongs to no layer, and put both models' streams before the first one."""
        for number, names in enumerate(self.outside):
            read = {name: self._stored(self.source.files.tensor(self.source.places[name])) for name in names}
            write_tensors(self._shard(number), read)
        for number, part in enumerate(self.parts):
            for side in ("source", "cut"):
                self.store[0, f"{side}.{number}"] = self.source.embed(part)
        if self.training is not None:
            self.training.begin(self.source.embed, self.source.embed)

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.source.stored) if tensor.is_floating_point() else tensor

    def _gain(self, index: int) -> Path:
        return self.work / "gains" / f"{index:05d}.json"

    def _errors_file(self, index: int) -> Path:
        return self.work / "errors" / f"{index:05d}.json"

    @torch.no_grad()
    def _layer(self, index: int, contexts: Sequence[dict[str, Any]]) -> Tensors:
        """The cut layer's tensors by their full names, healed where there are rows."""
        source, family = self.source, self.source.family
        whole = source.tensors(index)
        cut = dict(whole)
        layer, shape = family.take_layer(cut, index, source.config), source.shape.layers[index]
        if strategies.blind(self.plan.strategy):
            moments = weight_moments(layer, shape, source.shape.grain.rotary)
        else:
            moments = read_layer(moments_file(self.moments, index), shape, index, source.device)
        made = cut_layer(layer, shape, self.plan.target.layers[index], self.plan.keep[index], moments)
        if contexts:
            made |= {name: made[name].clone() for name in REFITTED if name in made and made[name] is layer.get(name)}
        family.put_layer(cut, index, made, source.config)
        if self.training is not None:  # which changes them all
            cut = {name: tensor.clone() for name, tensor in cut.items()}
        with self.frame.filled(index, cut) as ours:
            if contexts:
                with source.filled(index, whole) as theirs:
                    self._refit(index, theirs, ours, contexts)
                    if self.training is not None:
                        self._train(self.training, index, theirs, ours)
            balance([family.block(ours)])
            prefix = self.frame.prefix(index)
            return {f"{prefix}{name}": tensor for name, tensor in ours.state_dict().items()}

    def _refit(self, index: int, theirs: Any, ours: Any, contexts: Sequence[dict[str, Any]]) -> None:
        """Refit the layer to make up for the cuts before it, and write both models' streams behind it."""
        family, scratch = self.source.family, self.work / "scratch"
        rows: list[Any] = []
        for number, context in enumerate(contexts):
            source, cut = (self.store[index, f"{side}.{number}"] for side in ("source", "cut"))
            if self.place == self.source.device:
                rows.append(RefitBatch(source, cut, [context]))
            else:
                folder = scratch / str(number) if self.place == "disk" else None
                rows.append(_RowsElsewhere(folder, source, cut, context))
        gains = LayerRefit(family.block(ours), [family.block(theirs)], 0, rows, self.strength).all()
        write_atomically(self._gain(index), json.dumps({part: gain.to_json() for part, gain in gains.items()}))
        for number, row in enumerate(rows):
            for side in ("source", "cut"):
                self.store[index + 1, f"{side}.{number}"] = getattr(row, side)
        shutil.rmtree(scratch, ignore_errors=True)

    def _steps(self, training: blockwise.LayerWalk) -> int:
        return training.job.options.steps or blockwise.PASSES * len(training.parts["learned"])

    def _train(self, training: blockwise.LayerWalk, index: int, theirs: Any, ours: Any) -> None:
        """Train the layer in place, write its errors, and take both streams past it."""
        began, family, options = time.perf_counter(), self.source.family, training.job.options
        steps, device, last = self._steps(training), torch.device(self.source.device), len(self.source.layers) - 1
        span, whole = range(index, index + 1), [family.block(theirs)]
        pair = blockwise.LayerPair(index, span, whole, ours, family.block(ours), index == last)
        try:
            trainer = training.trainer(pair, blockwise.captures(device, steps))
            with torch.enable_grad():
                errors = trainer.train(range(steps), steps, options.rate or RATE, training.job.seed + index)
        except torch.OutOfMemoryError:
            size = blockwise.batch_tokens(options, device)
            raise HeadwiseError(
                f"the device has too little memory to train layers; add --heal-option batch={max(1, size // 4)}."
            ) from None
        write_atomically(self._errors_file(index), json.dumps({"errors": errors}))
        training.advance(pair, self.source.dtype)
        self.seconds += time.perf_counter() - began

    def finish(self, tokenizer: Any, folder: Path, beside: Callable[[Path], object]) -> None:
        """Add what else belongs to a model and rename its folder: it appears whole or not at all.

        `beside` adds files that are neither weights nor code.
        """
        if self.installed(folder):
            return
        target, model = self.work / "model", cast(Any, self.frame.model)
        with explained(folder):
            write_atomically(target / INDEX, json.dumps(self._index(), indent=2) + "\n")
            with families.quietly():
                model.config.architectures = [type(model).__name__]
                model.config.save_pretrained(target)
                if model.generation_config is not None:
                    model.generation_config.save_pretrained(target)
                tokenizer.save_pretrained(target)
                add_code(target, model)
            beside(target)
            install(target, folder)

    def installed(self, folder: Path) -> bool:
        """Whether this very work was killed after its model was put in its place."""
        done = self.store.position() == len(self.source.layers)
        return done and not (self.work / "model").exists() and (folder / INDEX).is_file()

    def _index(self) -> dict[str, Any]:
        """Which file holds which tensor, as transformers looks it up."""
        found = {name: entry for n in range(self.files) for name, entry in tensors.header(self._shard(n)).items()}
        return {
            "metadata": {"total_size": sum(entry.bytes for entry in found.values())},
            "weight_map": {name: found[name].file.name for name in sorted(found)},
        }


def _errors(path: Path, count: int) -> list[float]:
    """The errors of a layer at every check of its training."""
    found = read_object(path, advice=AGAIN).get("errors")
    if not isinstance(found, list) or len(found) != count or not all(type(value) is float for value in found):
        raise PlanError(f"{path} does not hold the errors of a layer's training; {AGAIN}.")
    return found
