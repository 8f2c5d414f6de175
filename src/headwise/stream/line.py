"""The straight line for models larger than memory: the same stages and files, one layer at a time."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwise import data, families, processes, strategies
from headwise.checks import certificate, exactness, speed
from headwise.errors import HeadwiseError, ModelError, PlanError
from headwise.families._folder import check_tokenizer
from headwise.memory import HELD, SHARE, available_bytes, fits
from headwise.progress import Track, silently
from headwise.runs.folder import RunFolder, budgets_for
from headwise.runs.healing import read_healing
from headwise.runs.settings import Settings
from headwise.stages.source import Texts, read_texts
from headwise.stream import build as building
from headwise.stream import probe as probing
from headwise.stream import verify as verifying
from headwise.stream._checkpoint import Checkpoint
from headwise.stream._model import Streamed, refuse_config
from headwise.tasks.causal import Causal
from headwise.types import Plan, Readings, Verdict
from headwise.types.verdict import MAX_LOSS, damage_limit

FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py"]
log = logging.getLogger("headwise")


class Bench(NamedTuple):
    """What every stage works with: the model on disk, what reads for it, and the rows."""

    source: Streamed
    tokenizer: Any
    texts: Texts


def wanted(settings: Settings, folder: RunFolder, tell: bool = True) -> bool:
    """Whether a run is streamed: as asked, as it was begun, or because the model needs more memory than is free."""
    if settings.stream is not None:
        return settings.stream
    if folder.streaming.exists():
        return True
    begun = (folder.probing, folder.moments_file, folder.model)
    if any(path.exists() for path in begun) or processes.count() > 1:
        return False
    numbers = _numbers(settings)
    if numbers is None or _fits(numbers, settings.device):
        return False
    if tell:
        log.warning(
            "%s would take about %.1f GB of memory in float32 and %.1f GB are free: it is streamed from disk, one "
            "layer at a time (--no-stream loads it all the same).",
            settings.model, HELD * numbers / 1e9, available_bytes() / 1e9,
        )  # fmt: skip
    return True


def _fits(numbers: int, device: str) -> bool:
    """Whether a model can be loaded whole: it comes by way of host memory, and works there or on a GPU."""
    if fits(numbers, "cpu"):
        return True
    gpu = device != "cpu" and torch.cuda.is_available() and fits(numbers, "cuda")
    return gpu and 4 * numbers <= SHARE * available_bytes()


def _numbers(settings: Settings) -> int | None:
    """Of a decoder that lies on this machine as safetensors; None for everything else, which cannot be streamed."""
    try:
        where = _folder(settings.model, local=True)
        config = families.read_config(str(where), trust_remote_code=settings.trust_remote_code)
        if families.task_of(config) != "causal":
            return None
        return sum(entry.numbers for entry in Checkpoint(where).entries.values())
    except Exception:  # whatever is wrong with the model, loading it says so
        return None


def _folder(model: str, local: bool = False) -> Path:
    """The folder of a model, fetched from the hub where it is not one; `local` takes only what is here already."""
    where, extra = families.locate(model)
    if extra or model.startswith("timm:"):
        raise ModelError(f"{model} cannot be streamed: only folders of safetensors can. Leave out --stream.")
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import snapshot_download

    with families.explained(model):
        return Path(snapshot_download(where, allow_patterns=FILES, local_files_only=local))


def bench_for(settings: Settings, track: Track = silently) -> Bench:
    """Open the model and cut the text into blocks."""
    from transformers import AutoTokenizer

    device = processes.begin(settings.device)
    _refuse(settings)
    where = _folder(settings.model)
    source = Streamed(where, device, settings.trust_remote_code)
    if any(layer.pooled > 1 for layer in source.shape.layers):
        raise ModelError("heads of this model share rows, which is not streamed; add --no-stream, or cut its source.")
    with families.explained(settings.model), families.quietly():
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=settings.trust_remote_code)
        check_tokenizer(tokenizer, settings.model)
    texts = read_texts(settings, source.family, source.config, tokenizer, Causal(), None, track)
    return Bench(source, tokenizer, texts)


def refuse(settings: Settings, config: Any) -> None:
    """What a streamed run cannot do, by its settings and the model's configuration."""
    _refuse(settings)
    refuse_config(config)
    if families.locate(settings.model)[1] or settings.model.startswith("timm:"):
        raise ModelError(f"{settings.model} cannot be streamed: only folders of safetensors can. Leave out --stream.")


def _refuse(settings: Settings) -> None:
    """What needs a whole model in memory, and what to do instead."""
    if settings.heal not in ("none", "refit"):
        raise HeadwiseError(f"--heal {settings.heal} needs both models in memory; streamed ones take refit or none.")
    if settings.portable or "depth" in settings.allow or settings.rounds > 1:
        raise HeadwiseError(
            "a streamed model is cut in one round, layer by layer; leave out --portable, --rounds and --allow depth, "
            "or use a machine with more memory."
        )
    if settings.pool != "none":
        raise HeadwiseError("a streamed model's heads are cut one by one; leave out --pool.")
    if any(text.strip().startswith("latency") for text in settings.budgets):
        raise HeadwiseError("a model that is streamed is too large to be timed; limit kv, params or flops instead.")
    if settings.task not in (None, "causal"):
        raise HeadwiseError(f"--task {settings.task} cannot be streamed: only decoders that write text can.")
    if processes.count() > 1:
        raise HeadwiseError("a streamed run has one process; start it without torchrun.")


def probe(settings: Settings, folder: RunFolder, bench: Bench, track: Track = silently) -> Readings:
    """Probe, or read what an earlier probing of the same run left in the folder."""
    if not folder.has_probed():
        mlp = not settings.only_kv and "mlp" in settings.allow
        pairs = not settings.only_kv or settings.strategy == "published"
        context = settings.served(bench.source.family.longest(bench.source.config))
        asked = probing.Wanted(settings.model, settings.seed, mlp, pairs, settings.swap_tokens, context)
        found = probing.probe(bench.source, bench.texts.calibration, asked, folder.streaming, track)
        found.save(folder.readings_file)
        folder.ledger.record("probe", ("readings.json", "streaming/moments"))
    return Readings.read(folder.readings_file)


def build(
    settings: Settings, folder: RunFolder, bench: Bench, track: Track = silently, plan: Plan | None = None
) -> None:
    """Probe, allocate, reshape, heal and save; with a given plan, carry out that one."""
    if plan is None:
        readings = probe(settings, folder, bench, track)
        budgets = budgets_for(settings, bench.source.shape)
        plan = strategies.allocate(readings, budgets, settings.strategy, settings.allow, False, settings.seed)
        folder.write_plan(plan, settings)
    elif not (probing.moments_file(folder.streaming, 0).exists() or strategies.blind(plan.strategy)):
        raise PlanError(f"{folder.path} holds no moments of a streamed model; probe it again with --stream.")
    rows, work = bench.texts.calibration if settings.heal == "refit" else None, folder.streaming
    healing = building.build(bench.source, plan, work, folder.model, bench.tokenizer, rows, track, settings.seed)
    folder.write_json(folder.heal_file, healing)
    folder.record_model(settings, ("model",))  # heal.json is added to, and the proof written, when it is verified
    building.clear(folder.streaming)


def verify(folder: RunFolder, bench: Bench, track: Track = silently, max_loss: str | None = None) -> Verdict:
    """Prove what was done: on the saved model, against the source, on held-out text."""
    plan, settings = Plan.read(folder.plan_file), folder.require()
    folder.require_model()
    cut = Streamed(folder.model, bench.source.device)
    if cut.shape.layers != plan.target.layers:
        raise PlanError(
            f"{folder.model} does not follow {folder.plan_file.name}; run headwise reshape {folder.path} again."
        )
    texts, seed, family = bench.texts, settings.seed, bench.source.family
    plan = exactness.priced_again(plan, bench.source.shape)
    longest = family.longest(bench.source.config)
    sizes = min(settings.length, longest), settings.served(longest), settings.eval_tokens
    asked = certificate.rows_for(bench.source.config, bench.tokenizer, texts.long, *sizes, seed)
    rows = {"evaluation": texts.evaluation, "rehearsal": texts.rehearsal}
    found = verifying.compare(bench.source, cut, rows, asked, seed, folder.streaming, folder.proof_file, track)
    expected = found.rehearsal.expected_damage()
    healing = read_healing(folder.heal_file)
    folder.write_json(folder.heal_file, replace(healing, rehearsed=expected).to_json())
    priced = {"sum_of_prices": plan.predicted_damage} if settings.swap_tokens else {}  # in nats only then
    checks, unchecked = verifying.checks(cut, plan, bench.source.shape, folder.model, folder.proof_file)
    max_loss = max_loss or settings.max_loss or MAX_LOSS
    by_length = found.lengths._asdict()
    by_length["not_measured"] += (*unchecked, "Speed: the models are read from disk, one layer at a time.")
    verdict = Verdict.of(
        quality=found.evaluation.summary(seed),
        size=verifying.sizes(cut, bench.source.shape),
        speed={},
        damage={"predicted": expected, **priced, **found.evaluation.damage(seed)},
        checks=tuple(checks),
        samples=(),
        evaluation=texts.described,
        tokens=data.count_tokens(texts.evaluation),
        machine=speed.machine(torch.device(bench.source.device)),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        max_loss=max_loss,
        limit=damage_limit(max_loss),
        **by_length,
    )
    folder.record_verdict(verdict, ("heal.json", "proof.safetensors"))
    return verdict


def run(settings: Settings, folder: RunFolder, track: Track = silently) -> None:
    """All stages but the report; what an earlier, killed run finished stays."""
    bench = bench_for(settings, track)
    if folder.has_built(settings):
        building.clear(folder.streaming)
    else:
        build(settings, folder, bench, track)
    if not folder.ledger.current("verdict"):
        verify(folder, bench, track)


def reshape(
    settings: Settings, folder: RunFolder, heal: str, options: tuple[str, ...], track: Track = silently
) -> None:
    """Carry out plan.json on the folder's model."""
    settings = replace(settings, heal=heal, heal_options=options)
    build(settings, folder, bench_for(settings, track), track, Plan.read(folder.plan_file))
