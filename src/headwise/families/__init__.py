"""Model families: one file each. Here: which family and task a model belongs to, and loading it by id or folder."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import HeadwiseError, ModelError
from headwise.families._architecture import (
    BARE,
    CAUSAL,
    CLASSIFIER,
    IMAGE_CLASSIFIER,
    MASKED,
    SEQ2SEQ,
    SPEECH,
)
from headwise.families._config import stored_dtype
from headwise.families._family import Block, Family, repeated
from headwise.families._folder import (
    check_config,
    check_folder,
    check_loaded,
    check_sizes,
    check_tokenizer,
    check_weights,
    is_plain,
)
from headwise.files.json import read_json, shortened
from headwise.registry import find, names
from headwise.runtime import modeling_headwise

__all__ = [
    "BARE",
    "CAUSAL",
    "CLASSIFIER",
    "EMBEDDED",
    "IMAGE_CLASSIFIER",
    "MASKED",
    "SEQ2SEQ",
    "SPEECH",
    "TASKS",
    "Block",
    "Family",
    "accompany",
    "auto_class_of",
    "companions",
    "configuration",
    "explained",
    "family_of",
    "family_of_type",
    "known",
    "load",
    "locate",
    "no_processor",
    "quietly",
    "read_config",
    "register",
    "repeated",
    "task_of",
]

EMBEDDED = "embedded"  # the name of the model that the package carries
TASKS = {  # -> Auto class
    "causal": CAUSAL,
    "masked": MASKED,
    "embedding": BARE,
    "classification": CLASSIFIER,
    "image_embedding": BARE,
    "image_classification": IMAGE_CLASSIFIER,
    "seq2seq": SEQ2SEQ,
    "speech": SPEECH,
}


def known() -> list[Family]:
    """All families; their tailored models are known to transformers from then on."""
    found = [find("headwise.families", name).FAMILY for name in names("headwise.families")]
    for family in found:
        for kind in family.kinds:
            _register(family, kind)
    return found


def register() -> None:
    """Make tailored models of all families known to transformers, so that plain `from_pretrained` loads them."""
    known()


@functools.cache
def _register(family: Family, kind: str) -> None:
    """Tell transformers' Auto classes about the tailored models of one kind."""
    import transformers

    try:
        made = family.kinds[kind].tailored_classes(kind)
    except (ImportError, RuntimeError):  # of a package that is installed but does not load
        if not family.package:
            raise
        return
    config = made.pop("AutoConfig")
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, cls in made.items():
        getattr(transformers, auto).register(config, cls, exist_ok=True)


def family_of(config: Any) -> Family:
    """The family of a configuration; an unsupported one is refused with the list of what is supported."""
    return family_of_type(str(config.model_type).removeprefix("headwise_"))


def family_of_type(kind: str) -> Family:
    """The family of a model_type; an unsupported one is refused with the list of what is supported."""
    for family in known():
        if kind in family.kinds:
            return family
    supported = ", ".join(kind for family in known() for kind in family.kinds)
    raise ModelError(f"models of type '{kind}' are not supported. Supported types: {supported}.")


modeling_headwise.describe = lambda config: family_of(config).anatomy(config)  # older models carry no anatomy


def task_of(config: Any) -> str:
    """What a model is for, by the head that its configuration names; a bare encoder is for embeddings."""
    family = family_of(config)
    head, anatomy = family.class_name(config), family.anatomy(config)
    ends = {end: auto for auto, end in anatomy.heads.items()}
    if MASKED in ends.values():
        ends["ForPreTraining"] = MASKED
    auto = next((auto for end, auto in ends.items() if head.endswith(end)), None)
    if auto is None and anatomy.roles and head in ("", f"{anatomy.stem}Model"):
        auto = next(iter(ends.values()))  # what a model of two stacks is for without a head, too
    if auto is None and family.shape_of(config).cached and CAUSAL in ends.values():
        auto = CAUSAL
    if auto is None and (head.endswith(anatomy.bare or "Model") or not head):
        auto = BARE
    if auto is None:
        raise ModelError(f"{head} is for none of the tasks {', '.join(TASKS)}. Choose one of them with --task.")
    return next(name for name, wanted in _tasks_of(family).items() if wanted == auto)


def _tasks_of(family: Family) -> dict[str, str]:
    """The tasks that there are for models that read what the family's read."""
    return {name: auto for name, auto in TASKS.items() if name.startswith("image_") == family.images}


def auto_class_of(model: nn.Module) -> str:
    """The name of the Auto class that loads a model like this one."""
    return family_of(model.config).auto_class_of(model)


def _auto_class(config: Any, task: str | None) -> str:
    """The Auto class for a task, or for the one that the configuration names."""
    family = family_of(config)
    if task is not None and task not in TASKS:
        raise ModelError(f"no task is called '{task}'. Known: {', '.join(TASKS)}.")
    auto = _tasks_of(family).get(task or task_of(config))
    able = [*family.anatomy(config).heads, *([] if family.shape_of(config).cached else [BARE])]
    if auto is None or auto not in able:
        tasks = ", ".join(name for name, wanted in _tasks_of(family).items() if wanted in able)
        named = task or task_of(config)
        raise ModelError(f"{family.name} models cannot be reshaped for the task {named}, only for: {tasks}.")
    return auto


def configuration(model: str, trust_remote_code: bool = False, task: str | None = None) -> Any:
    """The configuration of a model that can be reshaped for a task, or for its own; no weights are read."""
    register()
    where, extra = locate(model)
    with explained(model), quietly():
        config = read_config(where, **extra, trust_remote_code=trust_remote_code)
        if not extra:
            check_weights(where)
            check_sizes(where, family_of(config).shape_of(config))
        auto = _auto_class(config, task)
    if task is not None:  # as a loaded model has it
        config.architectures = [family_of(config).anatomy(config).stock_classes()[auto].__name__]
    return config


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
    if not path.exists() and (path.is_absolute() or model.startswith(".") or model.count("/") > 1):
        raise ModelError(f"{model} does not exist; give a hub id, a folder, a .gguf file or '{EMBEDDED}'.")
    return model, {}


def load(
    model: str,
    device: str = "cpu",
    trust_remote_code: bool = False,
    task: str | None = None,
    dtype: torch.dtype | str | None = None,
) -> tuple[nn.Module, Any]:
    """A model for inference, computed in float32 unless `dtype` says otherwise ("auto": as in the file).

    Beside it what reads for it: its tokenizer, or its image processor. `config.dtype` stays that of the file. Reads
    safetensors or GGUF only; missing or mismatched tensors are an error, never filled in. `task` is one of
    `TASKS` and chooses the head; if not given, the model's own. `config.architectures` names the class that was loaded.
    """
    from transformers import AutoTokenizer

    register()
    where, extra = locate(model)
    options: dict[str, Any] = {**extra, "trust_remote_code": trust_remote_code}
    with explained(model), quietly():
        config = read_config(where, **options)
        if not extra:
            check_weights(where)
            check_sizes(where, family_of(config).shape_of(config))
        auto = _auto_class(config, task)
        stored = stored_dtype(config)
        loader = {} if extra else {"use_safetensors": True}
        family = family_of(config)
        loaded: Any = family.stock_loader(config, auto).from_pretrained(
            where, dtype=dtype or torch.float32, output_loading_info=True, **options, **loader
        )
        found, info = loaded
        special = family.images or family.audio
        reader = _processor(family, where, options) if special else AutoTokenizer.from_pretrained(where, **options)
        check_tokenizer(reader, model)
    missing = _without_pooler(found, info["missing_keys"]) if auto == BARE else info["missing_keys"]
    if lost := sorted([*missing, *(key for key, *_ in info["mismatched_keys"])]):
        raise ModelError(
            f"{model} is damaged: {len(lost)} tensors are missing or misshapen, first {lost[0]}. Fetch it again."
        )
    check_loaded(found, model)
    found.config.dtype, found.config.architectures = stored, [type(found).__name__]
    return found.eval().to(device), reader


def read_config(where: str, **options: Any) -> Any:
    """The configuration of a folder or hub id, once its numbers are known to be sane.

    Nothing is asked on standard input: code that a repository brings is run if `trust_remote_code` is set, else not.
    """
    from transformers import AutoConfig

    check_folder(where)
    found = AutoConfig.from_pretrained(where, **{"trust_remote_code": False, **options})
    check_config(found.to_dict(), where)
    return found


def _processor(family: Family, where: str, options: dict[str, Any]) -> Any:
    """What prepares images (cuts, scales and colours them), or recordings and their texts."""
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        return (AutoProcessor if family.audio else AutoImageProcessor).from_pretrained(where, **options)
    except OSError:
        raise no_processor(where, family) from None


def no_processor(where: str, family: Family) -> ModelError:
    """The error for a folder that does not say how images or recordings are prepared."""
    what = ("recordings", "processor") if family.audio else ("images", "image processor")
    return ModelError(
        f"{where} holds no preprocessor_config.json, which says how {what[0]} are prepared; save the model's "
        f"{what[1]} beside it."
    )


@torch.no_grad()
def _without_pooler(model: nn.Module, missing: set[str]) -> set[str]:
    """What else is missing: embeddings need no pooler, so one that the file lacks is set to zeros."""
    pooler = {name for name in missing if name.startswith("pooler.")}
    for name in pooler:
        model.get_parameter(name).zero_()
    return set(missing) - pooler


def companions(model: str) -> dict[str, Path]:
    """Files that make an embedding model's folder one of sentence-transformers: name in the folder -> where it is."""
    where, _ = locate(model)

    def found(name: str) -> Path | None:
        if Path(where).is_dir():
            return path if (path := Path(where) / name).is_file() else None
        from transformers.utils.hub import cached_file

        cached = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
        return Path(cached) if cached else None

    modules = found("modules.json")
    if modules is None:
        return {}
    listed = read_json(modules, ModelError, "fetch the files again")
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ModelError(f"{modules} must list modules; fetch the files again.")
    folders = [module["path"] for module in listed if module.get("path")]
    if odd := [folder for folder in folders if not is_plain(folder)]:
        raise ModelError(f"{modules} names the folder {shortened(odd[0])}, which is not inside; fetch the files again.")
    names = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
    names += [f"{folder}/{file}" for folder in folders for file in ("config.json", "model.safetensors")]
    return {name: path for name in names if (path := found(name)) is not None}


def accompany(model: str, folder: Path) -> None:
    """Put a model's companions beside a reshaped model, so that it stays one of sentence-transformers."""
    for name, path in companions(model).items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)


@contextlib.contextmanager
def explained(model: str) -> Iterator[None]:
    """Turn what loading libraries raise into one line that says what to do."""
    try:
        yield
    except HeadwiseError:
        raise
    except ImportError as error:
        raise ModelError(f"{model} needs a package that is not installed ({error}).") from None
    except BaseException as error:  # transformers, hub client, safetensors and tokenizers each raise their own kinds
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of code in Rust
            raise
        reason = " ".join(str(error).split())[:300]
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{model} needs code that its repository brings, which is run only if asked for: look at it, then add "
                "--trust-remote-code to run, probe, reshape, heal and verify."
            ) from None
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
