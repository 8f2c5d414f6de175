"""A source that is larger than memory: the same line and files, one layer at a time. And which runs are streamed."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwise import devices, families, processes
from headwise.checks import exactness, speed
from headwise.data import own_text
from headwise.errors import HeadwiseError, ModelError
from headwise.families._folder import check_tokenizer
from headwise.files import disk
from headwise.memory import HELD, available_bytes, emptied, fits
from headwise.progress import Track, silently, stage
from headwise.runs.folder import RunFolder
from headwise.runs.heal_options import Options
from headwise.runs.healing import read_healing
from headwise.runs.settings import Settings
from headwise.stages.source import (
    Fitted,
    Judged,
    Probed,
    Source,
    codes_alone,
    codes_rows,
    pooled_heads,
    refuse_other_plan,
)
from headwise.stages.texts import read_texts, sources
from headwise.stream._checkpoint import Checkpoint
from headwise.stream._model import Streamed, refuse_config
from headwise.stream.build import StreamedBuild
from headwise.stream.probe import Wanted, probe
from headwise.stream.verify import checks, compare, counted
from headwise.tasks.causal import Causal
from headwise.types import Plan, Readings

FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
HEALS = ("blockwise", "refit", "none")
WRITING = 1.25  # times a model's weights: what it takes to write text
log = logging.getLogger("headwise")


@dataclass(frozen=True)
class Streaming(Source):
    """A source that is read from disk, one layer at a time; its `model` is a `Streamed`."""

    def probe(self, settings: Settings, folder: RunFolder, track: Track = silently, diagnose: bool = True) -> Probed:
        """Moments stay in the folder; there is nothing to diagnose without gradients."""
        if not folder.finished("probe"):
            mlp = not settings.only_kv and "mlp" in settings.allow
            pairs = not settings.only_kv or settings.strategy == "published"
            bits = codes_rows(settings, self.shape, self.task)
            sizes = not codes_alone(settings, self.shape, self.task)
            wanted = Wanted(settings.model, self.seed, mlp, pairs, bits, settings.swap_tokens, self.context, sizes)
            probe(self.model, self.calibration, wanted, folder.streaming, track).save(folder.readings_file)
            folder.ledger.record("probe", ("readings.json", "streaming/moments"))
        return Probed(Readings.read(folder.readings_file), [])

    def fit(self, settings: Settings, probed: Probed, plan: Plan, folder: RunFolder | None, track: Track) -> Fitted:
        """The new model lies in the folder's unfinished work until it is saved."""
        assert folder is not None, "a streamed model is built on disk"
        rows = None if settings.heal == "none" else self.calibration
        options, trains = Options.parse(settings.heal_options), settings.heal == "blockwise"
        work = StreamedBuild(self.model, plan, folder.streaming, rows, self.seed, options, trains)
        return Fitted(work, plan, [work.run(folder.model, track)], None)

    def save(self, settings: Settings, folder: RunFolder, fitted: Fitted) -> None:
        """When the model is verified, heal.json is completed and the proof written."""
        fitted.model.finish(self.tokenizer, folder.model, partial(families.accompany, settings.model))
        folder.write_json(folder.heal_file, fitted.healings[-1].to_json())
        folder.record_model(settings, ("model",))
        self.clear(settings, folder)

    def compare(self, settings: Settings, folder: RunFolder, plan: Plan, track: Track = silently) -> Judged:
        """Both models are walked side by side; nothing is timed."""
        cut = Streamed(folder.model, self.model.device, dtype=self.model.dtype)
        refuse_other_plan(folder, plan, cut.shape)
        rows, asked = {"evaluation": self.evaluation, "rehearsal": self.rehearsal}, self.certificate_rows(settings)
        found = compare(self.model, cut, rows, asked, self.seed, folder.streaming, folder.proof_file, track)
        expected = found.rehearsal.expected_damage()
        folder.write_json(folder.heal_file, replace(read_healing(folder.heal_file), rehearsed=expected).to_json())
        priced = {"sum_of_prices": plan.predicted_damage} if settings.swap_tokens else {}  # in nats only then
        made, unchecked = checks(cut, plan, self.shape, folder.model, folder.proof_file)
        unchecked += ["Speed: the models are read from disk, one layer at a time."]
        return Judged(
            quality=found.evaluation,
            lengths=found.lengths._replace(not_measured=(*found.lengths.not_measured, *unchecked)),
            expected={"predicted": expected, **priced},
            size=exactness.sizes(counted(cut)[0], self.shape),
            speed={},
            checks=tuple(made),
            samples=(),
            machine=speed.machine(torch.device(self.model.device)),
            files=("heal.json", "proof.safetensors"),
        )

    def clear(self, settings: Settings, folder: RunFolder) -> None:
        disk.remove(folder.streaming / "build")


def is_streamed(settings: Settings, folder: RunFolder, warn: bool = True) -> bool:
    """Whether a run is streamed: by its settings, as it began, or because the model needs more memory than is free."""
    if settings.stream is not None:
        return settings.stream
    if folder.streaming.exists():
        return True
    begun = (folder.probing, folder.moments_file, folder.model)
    if any(path.exists() for path in begun) or processes.count() > 1:
        return False
    device = devices.chosen(settings.device)
    sizes = _sizes(settings, device)
    if sizes is None or any(fits(size, place) for place, size in sizes.items()):
        return False
    if warn:
        log.warning(
            "%s would take about %.1f GB of memory and %.1f GB are free: it is streamed from disk, one layer at a time "
            "(--no-stream loads it all the same).",
            settings.model, HELD * sizes[device] / 1e9, available_bytes(device) / 1e9,
        )  # fmt: skip
    return True


def _sizes(settings: Settings, device: str) -> dict[str, int] | None:
    """Bytes that a model takes on the device that it can work on, or in host memory where it may borrow a GPU.

    Of a decoder that lies on this machine as safetensors; None for everything else, which cannot be streamed.
    """
    try:
        where = _folder(settings.model, local=True)
        config = families.read_config(str(where), trust_remote_code=settings.trust_remote_code)
        if families.task_of(config) != "causal":
            return None
        places = dict.fromkeys((device, "cpu") if settings.device == "auto" else (device,))
        numbers = sum(entry.numbers for entry in Checkpoint(where).entries.values())
        return {p: numbers * families.computed_dtype(config, settings.dtype, p).itemsize for p in places}
    except Exception:  # loading the model gives the reason
        return None


def _folder(model: str, local: bool = False) -> Path:
    """The folder of a model, fetched from the hub where it is not one; `local` takes only what is here already."""
    where = _location(model)
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import snapshot_download

    with families.explained(model):
        return Path(snapshot_download(where, allow_patterns=FILES, local_files_only=local))


def _location(model: str) -> str:
    """Where a model is; one that is no folder of safetensors is refused."""
    where, extra = families.locate(model)
    if extra or model.startswith("timm:"):
        raise ModelError(f"{model} cannot be streamed: only folders of safetensors can. Leave out --stream.")
    return where


def writes_whole(settings: Settings) -> bool:
    """Whether a model that is streamed fits on a GPU while it does nothing but write text."""
    device = devices.chosen(settings.device)
    sizes = _sizes(settings, device) if device != "cpu" else None
    return sizes is not None and WRITING * sizes[device] <= available_bytes(device)


def load_streaming(settings: Settings, track: Track = silently) -> Streaming:
    """Open the model and read the rows."""
    from transformers import AutoTokenizer

    device = processes.begin(settings.device)
    _refuse(settings)
    where = _folder(settings.model)
    with families.explained(settings.model):
        config = families.read_config(str(where), trust_remote_code=settings.trust_remote_code)
    dtype = families.computed_dtype(config, settings.dtype, device)
    family = families.family_of(config)
    share = partial(pooled_heads, settings, family, task=Causal())
    model = Streamed(where, device, settings.trust_remote_code, dtype, share)
    with families.explained(settings.model), families.quietly():
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=settings.trust_remote_code)
        check_tokenizer(tokenizer, settings.model)
    writer = None
    if any(map(own_text.writes_itself, sources(settings))) and writes_whole(settings):
        with stage(track, "loading the model"):
            writer, _ = families.load(settings.model, device, settings.trust_remote_code, settings.task, dtype)
    texts = read_texts(settings, family, model.config, tokenizer, Causal(), writer, track)
    del writer
    emptied()
    context = settings.served(family.longest(model.config))
    return Streaming(family, model, tokenizer, *texts, context=context, seed=settings.seed)


def refuse_to_stream(settings: Settings, config: Any) -> None:
    """What a streamed run cannot do, by its settings and the model's configuration."""
    _refuse(settings)
    refuse_config(config)
    _location(settings.model)


def _refuse(settings: Settings) -> None:
    """What needs a whole model in memory, and what to do instead."""
    if settings.heal not in HEALS:
        raise HeadwiseError(
            f"--heal {settings.heal} needs both models in memory; streamed ones take {' or '.join(HEALS)}."
        )
    if settings.heal == "blockwise" and Options.parse(settings.heal_options).tokens is not None:
        raise HeadwiseError(
            "layers of a streamed model are trained on the text of the calibration; leave out --heal-option tokens, "
            "or raise --tokens."
        )
    if settings.portable or {"depth", "rank"} & set(settings.allow) or settings.rounds > 1:
        raise HeadwiseError(
            "a streamed model is cut in one round, layer by layer; leave out --portable, --rounds and --allow "
            "depth and rank, or use a machine with more memory."
        )
    if any(text.strip().startswith("latency") for text in settings.budgets):
        raise HeadwiseError("a model that is streamed is too large to be timed; limit kv, params or flops instead.")
    if any(text.strip().startswith(("weights", "memory")) for text in settings.budgets):
        raise HeadwiseError(
            "weights of a streamed model stay in 16 bits; limit kv, params or flops, or use a machine with more memory."
        )
    if settings.task not in (None, "causal"):
        raise HeadwiseError(f"--task {settings.task} cannot be streamed: only decoders that write text can.")
    if processes.count() > 1:
        raise HeadwiseError("a streamed run has one process; start it without torchrun.")
