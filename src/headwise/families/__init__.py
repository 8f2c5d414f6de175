"""Model families: one file each. Here: which family a model belongs to, and loading it from a hub id or a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.registry import find, names
from headwise.runtime import register

EMBEDDED = "embedded"  # the name of the model that the package carries


def known() -> list[ModuleType]:
    """All families; their tailored models are known to transformers from then on."""
    found = [find("headwise.families", name) for name in names("headwise.families")]
    register()
    return found


def family_of(config: Any) -> ModuleType:
    """The family of a configuration; an unsupported one is refused with the list of what is supported."""
    kind = str(config.model_type).removeprefix("headwise_")
    for family in known():
        if kind in family.MODEL_TYPES:
            return family
    supported = ", ".join(kind for family in known() for kind in family.MODEL_TYPES)
    raise ModelError(f"models of type '{kind}' are not supported. Supported types: {supported}.")


def locate(model: str) -> tuple[str, dict[str, str]]:
    """Where a model is: folder or hub id, and the GGUF file in it if it is one."""
    if model == EMBEDDED:
        return str(Path(__file__).parent.parent / "embedded"), {}
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{model} does not exist; give the path of a .gguf file, a folder or a hub id.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"give the file: {path / files[0]}" if files else "give the folder that holds config.json"
        raise ModelError(f"{model} holds no config.json; {hint}.")
    if not path.exists() and (path.is_absolute() or model.startswith(".") or model.count("/") > 1):
        raise ModelError(f"{model} does not exist; give a hub id, a folder, a .gguf file or '{EMBEDDED}'.")
    return model, {}


def load(model: str, device: str = "cpu", trust_remote_code: bool = False) -> tuple[nn.Module, Any]:
    """A model for inference, computed in float32, and its tokenizer. `config.dtype` stays that of the file.

    Reads safetensors or GGUF only; missing or mismatched tensors are an error, never filled in.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    register()
    where, extra = locate(model)
    options: dict[str, Any] = {**extra, "trust_remote_code": trust_remote_code}
    with _explained(model), quietly():
        config = AutoConfig.from_pretrained(where, **options)
        family_of(config)
        stored = config.dtype or torch.float32
        loader = {} if extra else {"use_safetensors": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.float32, output_loading_info=True, **options, **loader
        )
        found, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    if lost := sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]):
        raise ModelError(
            f"{model} is damaged: {len(lost)} tensors are missing or misshapen, first {lost[0]}. Fetch it again."
        )
    found.config.dtype = stored
    return found.eval().to(device), tokenizer


@contextlib.contextmanager
def _explained(model: str) -> Iterator[None]:
    """Turn what loading libraries raise into one line that says what to do."""
    try:
        yield
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"{model} needs a package that is not installed ({error}).") from None
    except Exception as error:  # transformers, hub client, safetensors and tokenizers each raise their own kinds
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{model} cannot be loaded ({reason}). Check the name, or fetch the files again.") from None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' own progress bars and notices while something loads or is saved."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
