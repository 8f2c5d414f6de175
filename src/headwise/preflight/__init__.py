"""Checks before work begins: what cannot work is refused, and notes tell the user what may surprise.

Looks at settings, the model's configuration, and the beginnings and sizes of files; loads no weights, writes nothing,
and takes about a second beyond importing libraries.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise import budgets as prices
from headwise import devices, families, heal, strategies
from headwise.errors import HeadwiseError, ModelError
from headwise.families import Family
from headwise.preflight import _disk, _texts
from headwise.progress import note
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages import needed, words
from headwise.stages.source import heads_to_pool, refuse_packed, refuse_rounds, refuse_units
from headwise.strategies import _reach
from headwise.stream.source import is_streamed, refuse_to_stream
from headwise.types import ModelShape, under_time

__all__ = ["check", "memory_needed", "note_all"]


def note_all(settings: Settings, out: Path | str, latency: Sequence[str] = ()) -> None:
    """Check, and print the notes, and what memory the run will take."""
    for text in check(settings, out, latency):
        note(text)
    streamed = settings.stream or is_streamed(settings, RunFolder(out), warn=False)
    if text := needed.in_words(memory_needed(settings, streamed), devices.chosen(settings.device)):
        note(text)


def memory_needed(settings: Settings, streamed: bool = False) -> list[needed.Needed]:
    """What a run will take of memory, stage by stage, as far as it is known without loading the model."""
    config = families.configuration(settings.model, settings.trust_remote_code, settings.task)
    return needed.needed(settings, config, devices.chosen(settings.device), streamed)


def check(settings: Settings, out: Path | str, latency: Sequence[str] = ()) -> list[str]:
    """Notes for the user; what cannot work raises. `latency` is what a probing will time."""
    devices.check(settings.device)
    heal.check(settings.heal, settings.heal_options)
    module = strategies.chosen(settings.strategy, settings.allow, settings.portable)
    config = families.configuration(settings.model, settings.trust_remote_code, settings.task)
    family, task = families.family_of(config), settings.task or families.task_of(config)
    _files(settings.model, family)
    refuse_units(settings, family)
    streamed = _streamed(settings, RunFolder(out), config, bool(latency))
    shape = family.shape_of(config)
    heads = heads_to_pool(settings, shape)
    shape = settings.legal(shape.with_layers(tuple(layer.pooling(heads) for layer in shape.layers)))
    refuse_rounds(settings, shape)
    refuse_packed(settings, shape)
    budgets = prices.without_times(settings.budgets, shape)
    for text in latency:
        prices.workload(text, shape)
    units = under_time(settings.units) if "latency" in settings.limited else settings.units
    cuts = strategies.cuts(module, units)
    helpful = [unit for unit in family.units if unit != "rank" or not (settings.only_kv or streamed)]
    _reach.check(shape, budgets, module, cuts, [*helpful, "depth", *_bits(settings)])
    length, notes = _length(settings, family, config)
    notes += [words.to_do(budget, shape, settings.units) for budget in budgets if prices.of_weights(budget)]
    if settings.only_kv and settings.may_code and shape.codable and task == "causal":
        notes += [words.in_bits(budget, shape) for budget in budgets[:1]]
    notes += _ignored_units(settings, shape, module.NAME, cuts) + _prices(settings)
    notes += _texts.check(settings, family, config, task, length, streamed)
    return notes + _disk.check(settings, Path(out), shape, budgets)


def _files(model: str, family: Family) -> None:
    """A folder must hold weights that are read, and what reads for the model."""
    where, extra = families.locate(model)
    if not Path(where).is_dir() or extra:
        return
    if not any(Path(where).glob("*.safetensors")):
        raise ModelError(f"{model} holds no .safetensors file, and no other weights are read. Fetch or convert them.")
    if family.name == "timm":  # its configuration is enough
        return
    if family.images or family.audio:
        if not any(Path(where).glob("*processor_config.json")):
            raise families.no_processor(where, family)
    elif not families.has_words(where):
        with families.explained(model), families.quietly():
            families.tokenizer_of(model)


def _streamed(settings: Settings, folder: RunFolder, config: Any, timed: bool) -> bool:
    """Whether the model will be streamed; what that cannot do is refused."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not (settings.stream or (alone and is_streamed(settings, folder, warn=False))):
        return False
    refuse_to_stream(settings, config)
    if timed:
        raise HeadwiseError("a model that is streamed is too large to be timed; leave out --latency.")
    return True


def _length(settings: Settings, family: Family, config: Any) -> tuple[int, list[str]]:
    """Tokens of a block of text, and a note where the settings want more."""
    if family.images or family.audio:
        return settings.length, []
    longest = family.longest(config)
    found = family.row_length(settings.length, settings.served(longest))
    if found >= settings.length:
        return found, []
    limit = "the model takes" if settings.context is None else f"--context {settings.context:,}"
    return found, [f"--length {settings.length:,} is more than {limit}; rows have {found:,} tokens."]


def _bits(settings: Settings) -> tuple[str, ...]:
    """The units `bits` and `weights`, where a run with these settings could choose them."""
    wanted = replace(settings, allow=tuple(dict.fromkeys((*settings.allow, "bits", "weights"))))
    return (*(("bits",) if wanted.may_code else ()), *(("weights",) if wanted.may_pack else ()))


def _ignored_units(settings: Settings, shape: ModelShape, strategy: str, cuts: tuple[str, ...]) -> list[str]:
    """Units that were allowed and will stay; bits are allowed without being asked for."""
    if strategy == "portable" and shape.grain.portable is not None:
        cuts = tuple(unit for unit in cuts if unit in shape.grain.portable)
    if not (ignored := [unit for unit in settings.allow if unit not in (*cuts, "bits", "weights")]):
        return []
    return [
        f"{', '.join(ignored)} will not be cut, though --allow names it: strategy {strategy} cannot for this model."
    ]


def _prices(settings: Settings) -> list[str]:
    """Prices of healed layers want rows for healing beside those that they are measured on."""
    if settings.heal == "none" or settings.swap_tokens < settings.tokens:
        return []
    return [
        f"--swap-tokens {settings.swap_tokens:,} leaves none of the {settings.tokens:,} calibration tokens to heal "
        "layers on before they are priced, so prices are too hopeful; raise --tokens."
    ]
