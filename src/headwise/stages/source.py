"""The model that is cut, with what reads for it and the rows; and which models and units a run refuses."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import tasks
from headwise.checks import certificate, quality
from headwise.cuts import Moments
from headwise.cuts._pack import INSTALL
from headwise.errors import PlanError
from headwise.families import Family
from headwise.heal._job import Job
from headwise.linalg import Rounded
from headwise.progress import Track, silently
from headwise.runs.folder import RunFolder
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.stages.texts import LongText
from headwise.tasks.causal import Causal
from headwise.types import Check, Healing, ModelShape, Plan, Readings
from headwise.types.shape import ENGINES
from headwise.types.verdict import Sample

WIDEST_ROW = 1_024  # numbers of a coded row, unless one head alone has more: its bases grow with the square


class Probed(NamedTuple):
    """What a probing found: what allocation needs, and what the cuts need, by layer."""

    readings: Readings
    moments: list[Moments]  # none of a streamed model, whose cuts read them from its folder


class Fitted(NamedTuple):
    """A model that meets its budgets, the plan from the source to it, and what each healing did."""

    model: Any  # a module; of a streamed model the work that holds it on disk
    plan: Plan
    healings: list[Healing]  # one of each round; none where nothing was healed
    rehearsed: float | None  # damage to expect, from rows that nothing was fitted to; None: found when verified
    packed: dict[str, Rounded] = {}  # matrices in few bits, by the names of their modules


class Judged(NamedTuple):
    """How a saved model does beside its source."""

    quality: quality.Comparison
    lengths: certificate.Found
    expected: dict[str, float]  # damage as predicted before the evaluation
    size: dict[str, int]
    speed: dict[str, float]
    checks: tuple[Check, ...]
    samples: tuple[Sample, ...]
    machine: str
    files: tuple[str, ...] = ()  # of the run folder, written with this


@dataclass(frozen=True)
class Source(ABC):
    """The model that is cut, its family, what reads for it, and the rows; and what a run asks of it.

    `InMemory` holds the model, `Streaming` reads it from disk layer by layer. The run is the same line for both.
    """

    family: Family
    model: Any  # an `nn.Module` on our modules, or a `Streamed`
    tokenizer: Any
    calibration: torch.Tensor
    rehearsal: torch.Tensor  # of the calibration's source, kept from every fit: predicts the damage before evaluation
    evaluation: torch.Tensor
    described: str  # where the evaluation comes from
    truth: torch.Tensor | None = None  # the right answers to the evaluation, where they are known
    more: torch.Tensor | None = None  # rows of the calibration's source for a healing that reads more
    long: LongText | None = None  # held-out text, for rows of any length
    task: tasks.Task = Causal()
    context: int = 0  # tokens that will be served
    seed: int = 0
    spread: bool = False  # whether gradients are computed on all GPUs together, for a model that fits on none
    shrunk: nn.Module | None = None  # what earlier rounds made of the model

    @property
    def current(self) -> Any:
        """The model that is cut now: the source, or what earlier rounds made of it."""
        return self.model if self.shrunk is None else self.shrunk

    @property
    def shape(self) -> ModelShape:
        """The sizes of the source model."""
        return self.family.shape_of(self.model.config)

    @property
    def reader(self) -> Family:
        """The family as calibration reads with it: rows begin at positions all over the context that is served."""
        return self.family.offset(self.context, self.seed)

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the model reads them in its task."""
        return self.task.prepare(rows, self.seed).inputs

    def rehearse(self, model: nn.Module, track: Track = silently) -> quality.Comparison:
        """How a model does on rows of the calibration's source that nothing was fitted to."""
        pair = self.model, model
        return quality.compare(
            self.reader, *pair, self.rehearsal, track, self.task, self.seed, label="damage on calibration data"
        )

    def job(self, settings: Settings, cut: nn.Module, track: Track = silently, work: Path | None = None) -> Job:
        """What a healing is given; `work` is the folder that keeps what takes long."""
        text, held = (self.task.prepare(rows, self.seed) for rows in (self.calibration, self.rehearsal))
        more = None if self.more is None else self.task.prepare(self.more, self.seed)
        options = Options.parse(settings.heal_options)
        return Job(self.reader, self.task, self.model, cut, text, held, self.seed, track, work, options, more)

    def certificate_rows(self, settings: Settings) -> certificate.Asked:
        """Rows that show quality and retrieval up to the context that is served."""
        sizes = self.family.row_length(settings.length, self.context), self.context, settings.eval_tokens
        return certificate.rows_for(self.model.config, self.tokenizer, self.long, *sizes, self.seed)

    @abstractmethod
    def probe(self, settings: Settings, folder: RunFolder, track: Track = silently, diagnose: bool = True) -> Probed:
        """Measure the current model into a folder, or read what an earlier probing left there.

        `diagnose` also measures what only a reader of the report wants to know.
        """

    def expect_judgement(self, folder: RunFolder) -> None:
        """Begin, while the model is made, what its judgement would wait for."""
        return None

    @abstractmethod
    def fit(self, settings: Settings, probed: Probed, plan: Plan, folder: RunFolder | None, track: Track) -> Fitted:
        """Reshape the current model by a plan and heal it; long work is kept in the folder."""

    @abstractmethod
    def save(self, settings: Settings, folder: RunFolder, fitted: Fitted) -> None:
        """Write the model with what was done to it, and record it."""

    @abstractmethod
    def compare(self, settings: Settings, folder: RunFolder, plan: Plan, track: Track = silently) -> Judged:
        """Judge the model that the folder holds, reloaded, against the source."""

    @abstractmethod
    def clear(self, settings: Settings, folder: RunFolder) -> None:
        """Delete what only an unfinished fit would need: the model is recorded."""


def refuse_other_plan(folder: RunFolder, plan: Plan, found: ModelShape) -> None:
    """Refuse to verify a model that has other sizes than the plan."""
    if not plan.portable and found.layers != tuple(layer for layer in plan.target.layers if not layer.gone):
        raise PlanError(
            f"{folder.model} does not follow {folder.plan_file.name}; run headwise reshape {folder.path} again."
        )


def refuse_units(settings: Settings, family: Family) -> None:
    """Refuse units that models of a family cannot lose."""
    able = (*family.units, "depth", "bits", "weights")  # bits wherever there is a cache
    if lost := sorted(set(settings.allow) - set(able)):
        known = ", ".join(able)
        raise PlanError(f"{family.name} models cannot lose {lost[0]}; --allow takes, of these models: {known}.")


def refuse_rounds(settings: Settings, shape: ModelShape) -> None:
    """Refuse to choose bits in rounds: a model whose cache or weights have few bits is not cut again."""
    if settings.rounds > 1 and settings.may_pack:
        raise PlanError("bits of weights are chosen at once, not in rounds; leave out --rounds.")
    if settings.rounds > 1 and settings.may_code and shape.codable:
        units = ",".join(unit for unit in settings.allow if unit != "bits") or "qk,v,mlp"
        raise PlanError(
            "bits of the cache are chosen at once, not in rounds; leave out --rounds, or cut in rounds without bits: "
            f"--allow {units}."
        )


def pooled_heads(settings: Settings, family: Family, model: nn.Module, task: tasks.Task) -> int:
    """How many key/value heads will share a cached row (1: none); refused where the model cannot."""
    shape = family.shape_of(model.config)
    heads = heads_to_pool(settings, shape)
    if settings.pool == "auto" and not codes_rows(settings, shape, task):
        return 1
    if heads > 1 and any(name.endswith("pairs_GP") for name, _ in model.named_buffers()):
        if settings.pool == "auto":
            return 1
        raise PlanError("queries and keys of this model are cut already; leave out --pool, or pool its source's heads.")
    return heads


def _all_that_fit(settings: Settings, shape: ModelShape) -> int:
    """As many heads as make rows of a reasonable width, where rows are coded; 1 where heads cannot be pooled."""
    one_by_one = {"heads", "kv_heads"} & set(settings.allow) or any(layer.projected for layer in shape.layers)
    if not (settings.may_code and shape.codable) or one_by_one:
        return 1
    common = math.gcd(*(layer.kv_heads for layer in shape.layers))
    widest = max(max(layer.qk_width, layer.v_dim) for layer in shape.layers)
    return max(n for n in range(1, common + 1) if common % n == 0 and (n == 1 or n * widest <= WIDEST_ROW))


def codes_rows(settings: Settings, shape: ModelShape, task: tasks.Task) -> bool:
    """Whether a run chooses the bits of cached keys and values."""
    return settings.may_code and shape.codable and task.has_past


def codes_alone(settings: Settings, shape: ModelShape, task: tasks.Task) -> bool:
    """Whether a run chooses bits of cached keys and values alone. A direction without bits is dropped, so nothing else
    needs a price."""
    alone = settings.only_kv and not {"heads", "kv_heads"} & set(settings.allow)
    return codes_rows(settings, shape, task) and (alone or set(settings.allow) == {"bits"})


def packs_weights(settings: Settings, shape: ModelShape, task: tasks.Task) -> bool:
    """Whether a run chooses the bits of weights."""
    return settings.may_pack and shape.packable and type(task) is Causal


def refuse_packed(settings: Settings, shape: ModelShape) -> None:
    """Refuse to cut a model whose weights are in few bits already, and to store them so without the package."""
    if shape.packed:
        raise PlanError("the weights of this model have few bits already; cut the model that it was made from.")
    if settings.may_pack and find_spec("compressed_tensors") is None:
        units = ",".join(unit for unit in settings.allow if unit != "weights")
        raise PlanError(f"{INSTALL}; or leave them in 16 bits: --allow {units}.")


def heads_to_pool(settings: Settings, shape: ModelShape) -> int:
    """How many key/value heads will share a cached row, as far as the shape shows.

    Rotary pairs that are cut already show in the model alone.
    """
    if any(layer.coded for layer in shape.layers):
        raise PlanError("the cache of this model is coded in bits already; cut the model that it was made from.")
    if pooled := any(layer.pooled > 1 for layer in shape.layers):
        settings.refuse_to_pool()
    if settings.pool == "none":
        return 1
    if settings.pool == "auto":
        return 1 if pooled else _all_that_fit(settings, shape)
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
    if settings.pool != "all":
        return int(settings.pool)
    widest = max(max(layer.qk_width, layer.v_dim) for layer in shape.layers)
    most = max(ENGINES[settings.serve]) // widest if settings.serve else max(heads)  # a row of an engine's cache
    return max((n for n in range(1, max(heads) + 1) if max(heads) % n == 0 and n <= most), default=1)
