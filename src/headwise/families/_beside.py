"""Files that lie beside a model's weights and stay as they are when it is cut: tokens, licences, other settings."""

import json
import shutil
from pathlib import Path

import torch

from headwise.errors import ModelError
from headwise.families._config import stored_dtype
from headwise.families._folder import AGAIN, is_plain
from headwise.families._loading import EMBEDDED, locate
from headwise.files import tensors
from headwise.files.card import Facts, facts_of, short_card
from headwise.files.json import read_json, read_object, shortened

TOKENS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")  # how such names begin
ASKED = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "README.md")  # of a repository on the Hub
LARGEST = 1 << 22  # bytes of a licence
OWN = ("is_local", "local_files_only", "name_or_path")  # what a tokenizer notes of where it was loaded from
FORMATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def accompany(model: str, folder: Path, embeds: bool = False) -> None:
    """Put beside a reshaped model what lay beside its source, and a short card with its licence.

    `embeds`: also what makes the folder one of sentence-transformers.
    """
    where, extra = locate(model)
    source = None if extra else _folder(where)
    for path in _found(source) if source else ():
        if path.name != "tokenizer_config.json":
            shutil.copyfile(path, folder / path.name)
    _settle_tokenizer(folder / "tokenizer_config.json", source)
    for name, path in companions(model).items() if embeds else ():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    (folder / "README.md").write_text(short_card(_facts(model, where, source)))


def _folder(where: str) -> Path | None:
    """The folder of a model; of one from the Hub that of the files in the cache, with its licence and its card."""
    if Path(where).is_dir():
        return Path(where)
    found = [_file(where, name) for name in ("config.json", *ASKED)]
    return found[0].parent if found[0] else None


def _file(where: str, name: str) -> Path | None:
    """A file of a model's folder, or of its repository on the Hub; None where there is no such file."""
    if Path(where).is_dir():
        return path if (path := Path(where) / name).is_file() else None
    from transformers.utils.hub import cached_file

    cached = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
    return Path(cached) if cached else None


def _found(source: Path) -> list[Path]:
    """Files about tokens and licences."""
    own = [path for path in sorted(source.iterdir()) if path.is_file()]
    licences = [path for path in own if path.name.upper().startswith(LICENCES) and path.suffix != ".py"]
    small = [path for path in licences if path.stat().st_size <= LARGEST]
    return [path for path in own if path.name in TOKENS] + small


def _settle_tokenizer(path: Path, source: Path | None) -> None:
    """Let a tokenizer's settings be those of the source, with the class that was really loaded.

    Transformers chooses it by the model_type where the settings name none, and ours is another one.
    """
    if not path.is_file():
        return
    written = read_object(path, ModelError, AGAIN)
    place = source and source / path.name
    theirs = read_object(place, ModelError, AGAIN) if place and place.is_file() else written
    if "auto_map" in theirs or "tokenizer_class" not in written:  # code of its own, which is not copied
        theirs = written
    kept = {**theirs, **{name: written[name] for name in ("tokenizer_class",) if name in written}}
    text = json.dumps({k: v for k, v in kept.items() if k not in OWN}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n")


def _facts(model: str, where: str, source: Path | None) -> Facts:
    """What the card of a cut model says of its source: its licence, and its name where it is one on the Hub."""
    found = {} if source is None else facts_of(source / "README.md")
    found.pop("base_model", None)  # of the source, not of ours
    if model != EMBEDDED and not Path(where).exists():
        found["base_model"] = where
    return found


def saved_dtype(where: str, config: object) -> torch.dtype:
    """The number format that a cut model's file should have: that of the source's file, or of its configuration.

    A configuration may promise more than a file holds: it says what a model computes in.
    """
    stored = stored_dtype(config)
    first = next(iter(sorted(Path(where).glob("*.safetensors"))), None) if Path(where).is_dir() else None
    if first is None:
        return stored
    numbers: dict[str, int] = {}
    for entry in tensors.header(first, ModelError, AGAIN).values():
        numbers[entry.dtype] = numbers.get(entry.dtype, 0) + entry.numbers
    held = FORMATS.get(max(numbers, key=lambda name: numbers[name], default=""), stored)
    return min((stored, held), key=lambda dtype: dtype.itemsize)


def companions(model: str) -> dict[str, Path]:
    """Files that make an embedding model's folder one of sentence-transformers: name in the folder -> where it is."""
    where, _ = locate(model)
    modules = _file(where, "modules.json")
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
    return {name: path for name in names if (path := _file(where, name)) is not None}
