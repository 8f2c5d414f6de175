"""Two ways out: a tailored folder that brings its own code, or a portable one that stock transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import runtime
from headwise.cuts._pack import pack
from headwise.cuts._readers import warn_readers
from headwise.cuts.balance import balance
from headwise.errors import ModelError
from headwise.families import Family, family_of, set_format
from headwise.families._config import stored_dtype
from headwise.families._folder import odd_values
from headwise.files.disk import write_folder as write_folder
from headwise.linalg import Rounded
from headwise.runtime.hub_headwise import bring_code

TOLERANCE = 1e-4  # relative, between our modules and stock code, both in float32
SHARD = "4GB"  # of weights in a file: so much passes through host memory at a time


def save(
    family: Family,
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    portable: bool,
    dtype: torch.dtype | None = None,
    beside: Callable[[Path], object] | None = None,
    packed: Mapping[str, Rounded] | None = None,
) -> nn.Module:
    """Write a model folder, whole or not at all, and return the model as saved, on our modules and in its format.

    A portable one is rounded in its stock form, as its weights differ from ours by a factor before they are rounded.
    `dtype` is the number format of the file; if not given, that of the configuration, which stays what a loaded model
    computes in. `beside` adds other files to the folder. `packed` are the matrices that are stored in few bits, by the
    names of their modules; the model holds the same numbers.
    """
    own = family.tailor(model, share="all")
    own = own.float() if portable else own
    if not packed:  # whose numbers were chosen after that
        balance(family.blocks(own))
    leaving: Any = family.to_stock(own) if portable else own
    if portable:
        _refuse_other_answers(family, own, leaving)
    _refuse_odd_values(leaving)
    computed = dtype if packed and dtype else stored_dtype(own.config)
    set_format(leaving, dtype or computed)

    def write(target: Path) -> None:
        leaving.save_pretrained(target, max_shard_size=SHARD)
        leaving.config.dtype = computed  # which saving sets to that of the file
        leaving.config.save_pretrained(target)
        tokenizer.save_pretrained(target)
        if hasattr(tokenizer, "feature_extractor"):  # which others look for in a file of its own
            tokenizer.feature_extractor.save_pretrained(target)
        if packed:
            pack(target, packed, _tied(leaving))
        if portable:
            warn_readers(target, leaving.config)
        if beside is not None:
            beside(target)

    write_folder(folder, write)
    for name, new in (packed or {}).items():  # as it loads: scales are not rounded together with numbers
        leaving.get_submodule(name).weight.data = new.dense().to(leaving.device)
    return family.tailor(leaving) if portable else leaving


def _refuse_odd_values(model: nn.Module) -> None:
    """A model with numbers that no file of a model may hold is never written."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.numel() and (told := odd_values(parameter.detach())):
            raise ModelError(
                f"cutting this model gave values {told} in {name}; nothing was written. Give more or other text "
                "(--data, --tokens), a larger budget, or --heal none; if that does not help, check the model's weights."
            )


def _tied(model: nn.Module) -> dict[str, str]:
    """The modules that share the table of another, and that one."""
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    return {own.removesuffix(".weight"): other.removesuffix(".weight") for own, other in pairs}


@torch.no_grad()
def _refuse_other_answers(family: Family, own: nn.Module, stock: nn.Module) -> None:
    """A stock form that does not compute the same is never written."""
    rows = family.example(own.config, 1).to(own.device)
    ours, theirs = (family.call(model, rows)["logits"] for model in (own, stock.to(own.device)))
    error = float((ours - theirs).abs().max() / ours.abs().max())
    if not error <= TOLERANCE:
        raise ModelError(f"the stock form gives other answers (relative difference {error:.1e}); leave out --portable.")


def add_code(folder: Path, model: nn.Module) -> None:
    """Make a folder load without headwise: the runtime beside the weights, every class named, the anatomy written down.

    The runtime is the same for all models. Where a model's parts are is data, which only its family knows.
    """
    family = family_of(model.config)
    anatomy = family.anatomy(model.config)
    made = anatomy.tailored_classes(family.kind(model.config))
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {auto: f"{Path(runtime.CODE).stem}.{cls.__name__}" for auto, cls in made.items()}
    settings["architectures"] = [next(cls for cls in made.values() if isinstance(model, cls)).__name__]
    settings["headwise_anatomy"] = anatomy.to_json()
    bring_code(model.config, folder)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
