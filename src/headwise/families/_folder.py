"""Checks of a model's files before a library opens them: their kind, their sizes, and code that they bring."""

import re
from pathlib import Path
from typing import Any

import torch

from headwise.cost import parameters
from headwise.errors import ModelError
from headwise.files import disk, tensors
from headwise.files.json import INTEGER, read_object, regular, shortened
from headwise.types import ModelShape
from headwise.types.shape import MOST_LAYERS, MOST_TOKENS, WIDEST

AGAIN = "fetch the files again"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.pkl")
COUNT = re.compile(r"(^|_)(n_layers?|num_layers|num_hidden_layers|layers|depth|num_(encoder|decoder)_layers)$")
SIZE = re.compile(r"((^|_)(heads?|size|dim|width|d_model|d_ff|d_kv|n_embd|n_inner))$")
DROPOUT = re.compile(r"drop(out)?(_p|_prob|_rate|_path_rate)?$")  # which some models apply when they only read
CONTEXT = ("max_position_embeddings", "n_ctx", "n_positions", "max_source_positions", "max_target_positions")
LARGEST = 1e8  # of a weight; no model comes near
LONGEST = 1 << 31  # tokens that a configuration may promise to read
JSON_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "processor_config.json", "added_tokens.json",
)  # fmt: skip


def check_folder(where: str) -> None:
    """Refuse what cannot be a model: damaged JSON, sizes that no model has. Hub ids are left to the hub's client."""
    folder = Path(where)
    if not folder.is_dir():
        return
    disk.refuse_pipes(folder, ModelError)
    for name in JSON_FILES:
        if (folder / name).exists():
            data = read_object(folder / name, ModelError, AGAIN)
            if name == "config.json":
                check_config(data, str(folder / name))


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse numbers of layers, heads and widths that would only fill the memory, and kernels that are fetched."""
    for name, value in config.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id", "headwise_anatomy"):
            check_config(value, f"{where}, {name}")
        elif isinstance(value, int) and abs(value) >= INTEGER:
            raise ModelError(f"{where}: {name} is {shortened(value)}, a number that nothing can hold; restore it.")
        elif COUNT.search(name):
            _check_number(where, name, value, 0, MOST_LAYERS)
        elif name == "vocab_size":
            _check_number(where, name, value, 1, MOST_TOKENS)
        elif name in CONTEXT:
            _check_number(where, name, value, 2, LONGEST)
        elif DROPOUT.search(name) and not isinstance(value, str):
            _check_number(where, name, value, 0, 1)
        elif SIZE.search(name):
            _check_number(where, name, value, -1, WIDEST)
        elif name.endswith("attn_implementation") and isinstance(value, str) and "/" in value:
            raise ModelError(f"{where} asks for the kernel {value[:80]}, which is code from elsewhere; remove {name}.")


def _check_number(where: str, name: str, value: Any, least: int, most: int) -> None:
    """Lists, which some configurations have in place of a number, are left to the family."""
    if isinstance(value, str) or (isinstance(value, (int, float)) and not least <= value <= most):
        raise ModelError(
            f"{where}: {name} is {shortened(value)}; it lies between {least} and {most:,}. Restore it, or {AGAIN}."
        )


def check_weights(where: str) -> None:
    """Refuse a folder whose weights are no safetensors: other formats can run code when they are opened."""
    folder = Path(where)
    if not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return
    if found := sorted(path.name for kind in PICKLES for path in folder.glob(kind)):
        raise ModelError(
            f"{where} holds its weights as {found[0]}, which can run code when it is opened; only safetensors and GGUF "
            "are read. Where you trust it, convert it once with transformers: "
            "AutoModel.from_pretrained(FOLDER, use_safetensors=False).save_pretrained(NEW)"
        )


def check_sizes(where: str, shape: ModelShape) -> None:
    """Refuse a configuration that promises far more parameters than the files beside it can hold."""
    files = sorted(Path(where).glob("*.safetensors")) if Path(where).is_dir() else []
    if not files:
        return
    held = sum(regular(file, ModelError, AGAIN) for file in files)
    if (wanted := parameters(shape)) > 4 * held + 1_000_000:  # packed weights have two to a byte
        raise ModelError(
            f"{where}/config.json describes {wanted:,} parameters and its files hold {held:,} bytes; {AGAIN}."
        )
    for file in files:
        tensors.header(file, ModelError, AGAIN)


def check_loaded(model: Any, where: str) -> None:
    """Refuse weights that are not finite or absurdly large, and special tokens that no vocabulary has."""
    scales = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("weight_scale"))
    for name, tensor in (*model.named_parameters(), *scales):
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            check_values(tensor.detach(), name, where)
    settings = getattr(model, "generation_config", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        ids = getattr(settings, name, None)
        for number in ids if isinstance(ids, list) else [ids]:
            if number is None and not isinstance(ids, list):
                continue
            if not isinstance(number, int) or isinstance(number, bool) or not -1 <= number < MOST_TOKENS:
                raise ModelError(f"{where}: {name} is {shortened(ids)}, which is no token; restore its configuration.")
    for name in ("num_beams", "num_return_sequences", "num_beam_groups"):
        count = getattr(settings, name, None)
        if count is not None and not (isinstance(count, int) and 1 <= count <= 64):
            raise ModelError(f"{where}: {name} is {shortened(count)}; restore its generation_config.json.")


def check_values(tensor: torch.Tensor, name: str, where: str) -> None:
    """Refuse numbers that would overflow in the first product."""
    if odd := odd_values(tensor):
        raise ModelError(f"{where} is damaged: {name} holds values {odd}. Fetch it again.")


def odd_values(tensor: torch.Tensor) -> str:
    """The range of numbers that would overflow in the first product or are none; empty where all are sane."""
    low, high = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    sane = float(low) >= -LARGEST and float(high) <= LARGEST
    return "" if sane else f"from {float(low):g} to {float(high):g}"


def check_tokenizer(tokenizer: Any, where: str) -> None:
    """Refuse one that cannot read a word, and templates whose names would be written outside a model's folder."""
    if callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        tokenizer.decode(tokenizer("a b")["input_ids"], skip_special_tokens=True)
    templates = getattr(tokenizer, "chat_template", None)
    for name in templates if isinstance(templates, dict) else ():
        if not re.fullmatch(r"\w[\w.-]*", str(name)):
            raise ModelError(f"{where} has a chat template called {shortened(name)}, which is no file name; rename it.")


def is_plain(path: Any) -> bool:
    """Whether something names a folder directly inside another."""
    return isinstance(path, str) and re.fullmatch(r"\w[\w.-]*", path) is not None
