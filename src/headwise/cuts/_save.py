"""Two ways out: a tailored folder that brings its own code, or a portable one that stock transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from headwise.families import Family
from headwise.families._config import stored_dtype
from headwise.keeping.disk import write_folder as write_folder
from headwise.runtime import modeling_headwise


def save(family: Family, model: nn.Module, tokenizer: Any, folder: Path, portable: bool) -> nn.Module:
    """Write a model folder, whole or not at all, and return the model as saved (rounded to its stored dtype)."""
    rounded = family.tailor(model)
    rounded = rounded.to(stored_dtype(rounded.config))
    leaving = family.to_stock(rounded) if portable else rounded

    def write(target: Path) -> None:
        leaving.save_pretrained(target)
        tokenizer.save_pretrained(target)
        if hasattr(tokenizer, "feature_extractor"):  # which others look for in a file of its own
            tokenizer.feature_extractor.save_pretrained(target)
        if not portable:
            add_code(target, leaving)

    write_folder(folder, write)
    return rounded.float()


def add_code(folder: Path, model: nn.Module) -> None:
    """Put the runtime beside the weights and name every class, so that the folder loads without headwise."""
    source = Path(modeling_headwise.__file__)
    shutil.copyfile(source, folder / source.name)
    made = modeling_headwise.classes(model.config.model_type.removeprefix("headwise_"))
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {auto: f"{source.stem}.{cls.__name__}" for auto, cls in made.items()}
    settings["architectures"] = [next(c for c in made.values() if isinstance(model, c)).__name__]
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
