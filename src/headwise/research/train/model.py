"""The model of a training: from a configuration alone or with a folder's weights; and the folder that it ends in."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import families
from headwise.cuts import write_folder
from headwise.cuts._save import add_code
from headwise.data import documents
from headwise.errors import HeadwiseError, ModelError
from headwise.families import CAUSAL, CLASSIFIER, IMAGE_CLASSIFIER, MASKED, register
from headwise.families._folder import check_folder, check_tokenizer, check_weights
from headwise.files.json import read_object
from headwise.research.train.labelled import is_labelled
from headwise.research.train.settings import TrainSettings
from headwise.research.train.texts import train_tokenizer

AUTO = {"causal": CAUSAL, "masked": MASKED, "classification": CLASSIFIER, "image_classification": IMAGE_CLASSIFIER}
SAMPLE = 2_000  # texts that a tokenizer is trained on


@contextmanager
def loading(failure: str, advice: str = "") -> Iterator[None]:
    """Silence transformers, and turn whatever it, the hub's client or a tokenizer raises into one line."""
    try:
        with families.quietly():
            yield
    except BaseException as error:
        reason = families.reason_of(error)
        if "trust_remote_code" in str(error):
            reason = "it needs code that its repository brings, and there is no --trust-remote-code here: none is run"
        raise ModelError(f"{failure} ({reason}){advice}.") from None


def read_config(where: str) -> Any:
    """A stock or tailored configuration."""
    register()
    if where.endswith(".gguf"):
        raise ModelError(f"{where} cannot be trained further; give a folder with safetensors, or a configuration.")
    if where.endswith(".json") and not Path(where).is_file():
        raise ModelError(f"{where} does not exist; give a folder with config.json, or such a file.")
    with loading(f"{where} holds no configuration that transformers can read"):
        return families.read_config(where if where.endswith(".json") else families.locate(where)[0])


def task_for(settings: TrainSettings, config: Any) -> str:
    """The given task, or else the one that the data is for, or else the one that the model is for."""
    if settings.task is not None:
        return settings.task
    if settings.data.endswith(".npz"):
        return "image_classification"
    if is_labelled(settings.data):
        return "classification"
    try:
        found = families.task_of(config)
    except HeadwiseError:
        import transformers

        found = "causal" if type(config) in transformers.AutoModelForCausalLM._model_mapping else "masked"
    return found if found in AUTO else "image_classification" if found.startswith("image") else "masked"


def has_weights(where: str) -> bool:
    """Whether a folder holds weights to train further; a hub id always does. Pickled weights are refused."""
    if where.endswith(".json"):
        return False
    folder = Path(families.locate(where)[0])
    check_weights(str(folder))
    names = ("model.safetensors", "model.safetensors.index.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def build(settings: TrainSettings, config: Any, task: str) -> nn.Module:
    """The model in float32: random as its architecture draws it, or with the folder's weights."""
    import transformers

    auto = getattr(transformers, AUTO[task])
    how = dict(dtype=torch.float32, trust_remote_code=False)
    with loading(f"{settings.config} gives no model for the task {task}"), families.without_threads("cpu"):
        if settings.fresh or not has_weights(settings.config):
            return auto.from_config(config, **how)
        where = families.locate(settings.config)[0]
        found, info = auto.from_pretrained(where, config=config, use_safetensors=True, output_loading_info=True, **how)
    body = f"{found.base_model_prefix}."
    if lost := sorted(key for key in info["missing_keys"] if key.startswith(body)):
        raise ModelError(f"{settings.config} is damaged: {lost[0]} is missing. Fetch it again, or add --fresh.")
    loaded: nn.Module = found
    return loaded


def read_tokenizer(where: str) -> Any:
    """The tokenizer of a folder or hub id, or the embedded model's; no code of its repository is run."""
    from transformers import AutoTokenizer

    with loading(f"{where} holds no tokenizer that can be read", "; give --tokenizer FOLDER"):
        place = families.locate(where)[0] if where == families.EMBEDDED else where
        check_folder(place)
        found = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        check_tokenizer(found, where)
    return found


def tokenizer_for(settings: TrainSettings, config: Any, task: str, made: Path) -> Any:
    """The given tokenizer, the one beside the configuration, or one that is trained on the data into `made`."""
    where = settings.tokenizer
    if settings.train_tokenizer is not None:
        if not made.exists():
            texts = [text for _, text in zip(range(SAMPLE), documents(settings.data, settings.seed), strict=False)]
            trained = train_tokenizer(texts, settings.train_tokenizer, task != "causal")
            write_folder(made, trained.save_pretrained)
        where = str(made)
    found = read_tokenizer(where or _beside(settings.config, config))
    if len(found) > config.vocab_size:
        raise ModelError(
            f"the tokenizer has {len(found):,} tokens and the configuration a vocab_size of {config.vocab_size:,}; "
            f"set vocab_size to {len(found)} in config.json, or give another --tokenizer."
        )
    return found


def _beside(where: str, config: Any) -> str:
    """Where the tokenizer of a configuration is; one with the embedded model's vocabulary may use its tokenizer."""
    folder = Path(families.locate(where)[0]) if not where.endswith(".json") else Path(where).parent
    if not folder.is_dir() or any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return str(folder)
    embedded = read_object(Path(families.locate(families.EMBEDDED)[0]) / "config.json")
    if config.vocab_size == embedded["vocab_size"]:
        return families.EMBEDDED
    raise ModelError(
        f"{where} has no tokenizer beside it; give --tokenizer FOLDER, or train one on the data: "
        f"--train-tokenizer {config.vocab_size}."
    )


def save(model: nn.Module, dtype: Any, folder: Path, tokenizer: Any, processor: dict[str, Any] | None) -> None:
    """Write the model as a normal folder, in the dtype that its configuration names."""
    stored = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
    leaving: Any = model if stored == torch.float32 else copy.deepcopy(model).to(stored)
    leaving.config.dtype = stored
    for name, value in {**vars(leaving.config)}.items():
        if name in ("architectures", "auto_map") and value:
            setattr(leaving.config, name, None)

    def write(target: Path) -> None:
        leaving.save_pretrained(target)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        if processor is not None:
            (target / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
        if str(leaving.config.model_type).startswith("headwise_"):
            add_code(target, leaving)

    with families.quietly():
        write_folder(folder, write)
