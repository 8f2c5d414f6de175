"""Proof for a model that is larger than memory: source and cut model are walked side by side, layer by layer."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from headwise.checks import _lengths as lengths
from headwise.checks import certificate, exactness
from headwise.checks.quality import Comparison
from headwise.cost import kv_bytes_per_token
from headwise.data import batches
from headwise.families import CAUSAL
from headwise.files.disk import write_file
from headwise.memory import SHARE, available_bytes, emptied
from headwise.progress import Track, silently
from headwise.stream._model import Streamed
from headwise.stream._store import StreamStore, checksum
from headwise.tasks.causal import Causal
from headwise.types import Check, ModelShape, Plan

RELOAD_FACTOR = {"cpu": 1.5, "cuda": 1.1}  # memory that a fresh process takes to load a model, over its weights' bytes


class StreamedComparison(NamedTuple):
    """How the cut model answers beside the source: on held-out rows, on rows of the calibration's source, by length."""

    evaluation: Comparison
    rehearsal: Comparison
    lengths: certificate.Found


class SideBySide:
    """Both models' streams on their way through the layers, on disk between them."""

    def __init__(self, source: Streamed, cut: Streamed, rows: dict[str, torch.Tensor], seed: int, folder: Path) -> None:
        self.models, self.seed = {"source": source, "cut": cut}, seed
        self.parts = {f"{name}.{n}": part for name, text in rows.items() for n, part in enumerate(batches(text, 2048))}
        key = {
            "rows": [checksum(text) for text in rows.values()],
            "files": [[file.name, file.stat().st_mtime_ns] for file in sorted(cut.files.folder.glob("*.safetensors"))],
        }
        self.store = StreamStore(folder / "verify", key, source.device)
        self.count = len(source.layers)

    @torch.no_grad()
    def run(self, track: Track = silently) -> None:
        """Pass every layer that is not done yet."""
        contexts = {side: model.contexts(list(self.parts.values())) for side, model in self.models.items()}
        for index in self.store.walk(self.count, self._begin, track, "quality"):
            for side, model in self.models.items():
                with model.layer(index) as layer:
                    for name, context in zip(self.parts, contexts[side], strict=True):
                        stream = self.store[index, f"{side}.{name}"]
                        with exactness.uncoded(layer) if name.startswith("proof.") else nullcontext():
                            self.store[index + 1, f"{side}.{name}"] = model.run(index, stream, context[index])

    def _begin(self) -> None:
        for name, part in self.parts.items():
            for side, model in self.models.items():
                self.store[0, f"{side}.{name}"] = model.embed(part)

    def last(self, side: str, name: str, row: int) -> torch.Tensor:
        """A row's stream after the last layer."""
        return self.store[self.count, f"{side}.{name}"][row : row + 1].float()

    def _rows(self, which: str) -> list[tuple[str, int]]:
        """All rows of a name, by batch and place."""
        names = [name for name in self.parts if name.startswith(f"{which}.")]
        return [(name, row) for name in names for row in range(len(self.parts[name]))]

    @torch.no_grad()
    def compared(self, which: str, track: Track = silently) -> Comparison:
        """The answers of both models to the rows of a name, row by row."""
        task, found, device = Causal(), [], torch.device(self.models["source"].device)
        for name, row in track(self._rows(which), "answers"):
            batch = task.prepare(self.parts[name][row : row + 1], self.seed).to(device)
            before, after = (
                task.outputs_from(model.family, model.model, self.last(side, name, row), batch)
                for side, model in self.models.items()
            )
            found.append(task.compare(before, after, batch.labels))
        return Comparison(*(torch.cat(column).cpu().numpy() for column in zip(*found, strict=True)))

    @torch.no_grad()
    def predicted(self, which: str, track: Track = silently) -> lengths.Tokens:
        """How both models predict the rows of a name, token by token."""
        source, cut = self.models.values()
        found = []
        for name, row in track(self._rows(which), which):
            before, after = (self.last(side, name, row) for side in self.models)
            ids = self.parts[name][row : row + 1]
            found.append(lengths.predictions(source.family, (source.model, cut.model), (before, after), ids))
        return lengths.together(found)

    @torch.no_grad()
    def write_proof(self, path: Path) -> None:
        """Write the cut model's answers to the rows called `proof`."""
        cut = self.models["cut"]
        logits = cut.family.logits(cut.model, self.last("cut", "proof.0", 0))
        tensors = {"input_ids": self.parts["proof.0"][:1], "logits": logits.float()}
        how = str(cut.dtype).removeprefix("torch."), torch.device(cut.device).type
        write_file(path, lambda new: exactness.save_proof(tensors, new, CAUSAL, *how))


def compare(
    source: Streamed,
    cut: Streamed,
    rows: dict[str, torch.Tensor],
    asked: certificate.Asked,
    seed: int,
    folder: Path,
    proof: Path,
    track: Track = silently,
) -> StreamedComparison:
    """Compare both models on the rows `evaluation` and `rehearsal` and on rows of other lengths.

    Also writes the answers to a few tokens, which prove that the model loads the same elsewhere.
    """
    proving = {"proof": rows["evaluation"][:1, : exactness.PROOF_TOKENS]}
    asked = _ends_only(asked)
    reasons = _too_large(source, cut, asked, folder)
    more = {label: text for label, text in asked.rows().items() if label not in reasons}
    walk = SideBySide(source, cut, rows | proving | more, seed, folder)
    walk.run(track)
    by_length = certificate.gathered(asked, lambda label, _: reasons.get(label) or walk.predicted(label, track), seed)
    found = StreamedComparison(walk.compared("evaluation", track), walk.compared("rehearsal", track), by_length)
    walk.write_proof(proof)
    walk.store.clear()
    return found


def _ends_only(asked: certificate.Asked) -> certificate.Asked:
    """The shortest and the longest length alone: streams lie on disk meanwhile, those of every length anew."""
    ends = sorted(asked.lengths)[:1] + sorted(asked.lengths)[-1:]
    return asked._replace(lengths={length: asked.lengths[length] for length in dict.fromkeys(ends)})


def _too_large(source: Streamed, cut: Streamed, asked: certificate.Asked, folder: Path) -> dict[str, str]:
    """Why some rows cannot be read here: a row's memory, or the disk that all streams take on their way."""
    configs, numbers = (source.config, cut.config), source.shape.hidden_size
    folder.mkdir(parents=True, exist_ok=True)
    free, found = SHARE * shutil.disk_usage(folder).free, {}
    for label, rows in asked.rows().items():
        needed = source.dtype.itemsize * 2 * 2 * numbers * rows.numel()  # two models, before and behind a layer
        reason = lengths.too_large(source.family, configs, rows.shape[1], source.device)
        if not reason and needed > free:
            reason = f"it takes {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} are free"
        if reason:
            found[label] = reason
        else:
            free -= needed
    return found


def counted(model: Streamed) -> tuple[dict[str, int], ModelShape]:
    """Parameters, and cache bytes of a token, by the sizes that the headers of the files name; and the whole shape."""
    entries, places = model.files.entries, model.family.tensors(model.config)
    layers = []
    for index, said in enumerate(model.shape.layers):
        where = {name: model.places.get(model.prefix(index) + place, "") for name, place in places.items()}
        shapes = {name.removesuffix(".weight"): entries[at].shape for name, at in where.items() if at in entries}
        layers.append(exactness.layer_of(said, shapes))
    shape = model.shape.with_layers(tuple(layers))
    buffers = {name for name, _ in model.model.named_buffers()}
    numbers = sum(entries[place].numbers for name, place in model.places.items() if name not in buffers)
    return {"parameters": numbers, "kv_bytes_per_token": kv_bytes_per_token(shape)}, shape


def checks(cut: Streamed, plan: Plan, source: ModelShape, folder: Path, proof: Path) -> tuple[list[Check], list[str]]:
    """Sizes as planned, budgets met, and the model as a fresh process loads it; in words, where memory forbids that."""
    found, shape = counted(cut)
    made = [*exactness.plan_checks(found, plan, source), *exactness.budget_checks(plan.budgets, shape, found)]
    emptied()
    place = torch.device("cpu" if cut.dtype == torch.float32 else cut.device)  # as the proof has it
    needed, free = RELOAD_FACTOR[place.type] * cut.dtype.itemsize * found["parameters"], available_bytes(place)
    if needed < free:
        return [*made, exactness.reload_check(folder, proof, plan.portable)], []
    return made, [f"Reloading in a fresh process: it takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free."]
