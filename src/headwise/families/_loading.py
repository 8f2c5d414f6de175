"""Loading a model by hub id, folder or file, with every way it can fail put in one line."""

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import HeadwiseError, ModelError
from headwise.families import _folder as folder
from headwise.families import _missing as missing
from headwise.families._architecture import BARE
from headwise.families._config import stored_dtype
from headwise.families._family import Family
from headwise.families._known import auto_class, family_of, register
from headwise.files.json import shortened
from headwise.registry import find
from headwise.runtime.packed_headwise import Packed

IN_A_LAYER = re.compile(r"\.\d+\.")
log = logging.getLogger("headwise")
EMBEDDED = "embedded"  # the name of the model that the package carries
TOKENIZERS = (  # files with a tokenizer's words; tokenizer_config.json alone has none
    "tokenizer.json", "tokenizer.model*", "tokenization_*.py", "vocab*", "*.model", "*.vocab", "merges.txt",
    "*.tiktoken", "tekken.json",
)  # fmt: skip


def configuration(model: str, trust_remote_code: bool = False, task: str | None = None) -> Any:
    """The configuration of a model that can be reshaped for a task, or for its own; no weights are read."""
    with explained(model), quietly():
        config, auto, *_ = _checked(model, trust_remote_code, task)
    if task is not None:  # as a loaded model has it
        config.architectures = [family_of(config).anatomy(config).stock_classes()[auto].__name__]
    return config


def _checked(model: str, trust: bool, task: str | None) -> tuple[Any, str, str, dict[str, Any]]:
    """Configuration, Auto class for the task, place and options of a model whose files can be what they say."""
    register()
    where, extra = locate(model)
    options: dict[str, Any] = {**extra, "trust_remote_code": trust}
    config = read_config(where, **options)
    if not extra:
        folder.check_weights(where)
        folder.check_sizes(where, family_of(config).shape_of(config))
    return config, auto_class(config, task), where, options


def locate(model: str) -> tuple[str, dict[str, str]]:
    """Where a model is: folder or hub id, and the GGUF file in it if it is one."""
    if model == EMBEDDED:
        return str(Path(__file__).parent.parent / "embedded"), {}
    if model.startswith("timm:"):
        return find("headwise.families", "timm").hub_id(model.removeprefix("timm:")), {}
    if "\0" in model or len(model) > 1000:
        raise ModelError(f"{shortened(model)} is no name of a model; give a hub id, a folder or a .gguf file.")
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{model} does not exist; give the path of a .gguf file, a folder or a hub id.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"give the file: {path / files[0]}" if files else "give the folder that holds config.json"
        raise ModelError(f"{model} holds no config.json; {hint}.")
    if not path.exists():
        missing.check(model)
    return model, {}


def load(
    model: str,
    device: str = "cpu",
    trust_remote_code: bool = False,
    task: str | None = None,
    dtype: torch.dtype | str | None = None,
    packed: bool = False,
) -> tuple[nn.Module, Any]:
    """A model for inference, computed in float32 unless `dtype` says otherwise ("auto": as in the file).

    Beside it what reads for it: its tokenizer, or its image processor. `config.dtype` stays that of the file. Reads
    safetensors or GGUF only; missing or mismatched tensors are an error, never filled in. `task` is one of
    `TASKS` and chooses the head; if not given, the model's own. `config.architectures` names the class that was loaded.
    Weights in few bits are unpacked, or stay so in memory if `packed`.
    On a GPU weights go from the file to the device one by one: host memory never holds the model.
    """
    with explained(model), quietly():
        config, auto, where, options = _checked(model, trust_remote_code, task)
        family, stored, gguf = family_of(config), stored_dtype(config), "gguf_file" in options
        how: dict[str, Any] = {} if gguf else {"use_safetensors": True}
        if torch.device(device).type == "cuda" and not (gguf or family.package) and find_spec("accelerate"):
            how["device_map"] = {"": device}
        few = family.kind(config) != config.model_type and getattr(config, "quantization_config", None) is not None
        how |= {"dtype": stored if dtype == "auto" else dtype or torch.float32, "output_loading_info": True}
        with _silence() if few else contextlib.nullcontext(), without_threads(device):
            found, info = family.stock_loader(config, auto).from_pretrained(where, **options, **how)
        found = _unpacked(family, found) if few and not packed else found
        special = family.images or family.audio
        reader = _processor(family, where, options) if special else tokenizer_of(model, trust_remote_code)
        folder.check_tokenizer(reader, model)
    missing = _without_pooler(found, info["missing_keys"]) if auto == BARE else info["missing_keys"]
    if lost := sorted([*missing, *(key for key, *_ in info["mismatched_keys"])]):
        raise ModelError(
            f"{model} is damaged: {len(lost)} tensors are missing or misshapen, first {lost[0]}. Fetch it again."
        )
    if gguf and found.get_input_embeddings().weight.shape[1] != found.config.hidden_size:  # GGUF: nothing checked it
        raise ModelError(f"{model} is damaged: its width is not that of its tensors. Fetch it again.")
    folder.check_loaded(found, model)
    if unread := sorted(key for key in info["unexpected_keys"] if IN_A_LAYER.search(key)):
        log.warning("note: %s holds %d tensors of layers that its configuration does not name, first %s; they are not "
                    "read.", model, len(unread), unread[0])  # fmt: skip
    found.config.dtype, found.config.architectures = stored, [type(found).__name__]
    return found.eval().to(device), reader


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without the bars and notices of a quantiser."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _unpacked(family: Family, model: Any) -> nn.Module:
    """The model with all weights in full."""
    held = {name: module for name, module in model.named_modules() if isinstance(module, Packed)}
    inside = tuple(f"{name}." for name in held)
    found = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
    for name, module in held.items():
        if not model.config.tie_word_embeddings or module is not model.get_output_embeddings():
            own = {"weight": module.rows(slice(None)), "bias": getattr(module, "bias", None)}
            found |= {f"{name}.{part}": tensor for part, tensor in own.items() if tensor is not None}
    return family.build(model, family.shape_of(model.config).layers, found)


def read_config(where: str, **options: Any) -> Any:
    """The configuration of a folder or hub id, once its numbers are known to be sane.

    Never prompts: code that a repository brings is run if `trust_remote_code` is set, else not.
    """
    from transformers import AutoConfig

    folder.check_folder(where)
    found = AutoConfig.from_pretrained(where, **{"trust_remote_code": False, **options})
    folder.check_config(found.to_dict(), where)
    return found


def _processor(family: Family, where: str, options: dict[str, Any]) -> Any:
    """What prepares images (cuts, scales and colours them), or recordings and their texts."""
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        return (AutoProcessor if family.audio else AutoImageProcessor).from_pretrained(where, **options)
    except OSError:
        raise no_processor(where, family) from None


def tokenizer_of(model: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model; a folder that has none is refused with that reason."""
    from transformers import AutoTokenizer

    where, extra = locate(model)
    try:
        return AutoTokenizer.from_pretrained(where, **extra, trust_remote_code=trust_remote_code)
    except (ValueError, OSError):
        if extra or has_words(where):
            raise
        raise ModelError(f"{model} holds no tokenizer; save the model's tokenizer beside it.") from None


def has_words(where: str) -> bool:
    """Whether a folder holds the words of a tokenizer, which only those that read bytes do without.

    Of hub ids that is not known.
    """
    folder = Path(where)
    return not folder.is_dir() or any(file for pattern in TOKENIZERS for file in folder.glob(pattern))


def no_processor(where: str, family: Family) -> ModelError:
    """The error for a folder that does not say how images or recordings are prepared."""
    what = ("recordings", "processor") if family.audio else ("images", "image processor")
    return ModelError(
        f"{where} holds no preprocessor_config.json, which says how {what[0]} are prepared; save the model's "
        f"{what[1]} beside it."
    )


@torch.no_grad()
def _without_pooler(model: nn.Module, missing: set[str]) -> set[str]:
    """The other missing tensors. Embeddings need no pooler: one that the file does not hold is set to zeros."""
    pooler = {name for name in missing if name.startswith("pooler.")}
    for name in pooler:
        model.get_parameter(name).zero_()
    return set(missing) - pooler


@contextlib.contextmanager
def explained(model: str) -> Iterator[None]:
    """Turn what loading libraries raise into one line that says what to do."""
    try:
        yield
    except ImportError as error:
        raise ModelError(f"{model} needs a package that is not installed ({error}).") from None
    except BaseException as error:
        reason = reason_of(error)
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{model} needs code that its repository brings, which is run only if asked for: look at it, then add "
                "--trust-remote-code to run, probe, reshape, heal and verify."
            ) from None
        raise ModelError(f"{model} cannot be loaded ({reason}). Check the name, or fetch the files again.") from None


def reason_of(error: BaseException) -> str:
    """Why something cannot be loaded, in one line; what has another cause is raised again.

    Transformers, the hub's client, safetensors and tokenizers each raise their own kinds.
    """
    other = not isinstance(error, Exception) and type(error).__name__ != "PanicException"  # of code in Rust
    if other or isinstance(error, HeadwiseError):
        raise error
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError) or "start new thread" in reason:
        raise MemoryError(reason) from None
    return reason


@contextlib.contextmanager
def without_threads(device: str) -> Iterator[None]:
    """Let transformers read weights one after the other where they stay in host memory, within a block.

    Python waits forever for a thread that gets no memory to start.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    if torch.device(device).type != "cpu" or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


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
