"""What other libraries ask of a tailored model: its code beside it when it is saved, pickling, adapters by peft.

Needs nothing but Python; lies beside every tailored model. Written by Headwise (Apache-2.0).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

PARTS = ("modeling", "softmax", "cache", "prompt", "step", "coder", "packed", "hub")
FILES = tuple(f"{name}_headwise.py" for name in PARTS)
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}  # projections that every tailored attention has
_recording: dict[type, type] = {}  # stock class of a body -> ours


def bring_code(config: Any, folder: Any) -> None:
    """Copy these files into a folder, and let the configuration name them there and in no other repository."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in FILES:
        place, own = Path(folder, name), Path(__file__).with_name(name)
        if not (place.exists() and place.samefile(own)):
            shutil.copyfile(own, place)
    named = getattr(config, "auto_map", None) or {}
    config.auto_map = {auto: str(text).rpartition("--")[2] for auto, text in named.items()}


def saving(stock: Any) -> Any:
    """`save_pretrained` of a tailored class: the folder loads again, also where Headwise is not installed."""

    def save_pretrained(self: Any, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> Any:
        """As stock code's, with the files that the model runs on."""
        adapters_only = getattr(self, "_hf_peft_config_loaded", False)
        if is_main_process and not adapters_only and not Path(save_directory).is_file():
            bring_code(self.config, save_directory)
        return stock.save_pretrained(self, save_directory, is_main_process=is_main_process, **kwargs)

    return save_pretrained


def recording(stock: type, recorded: dict[str, Any], registry: dict[str, Any]) -> type:
    """A class like a body's whose attention weights transformers can record; one of ours is taken as it is.

    Transformers looks up what to record by the class. Objects of the new one can be pickled: it is made again.
    """
    made: Any = stock if _is_ours(stock) else _recording.get(stock)
    changed = made is not None and made is not stock and made.__bases__ != (stock,)  # as vLLM does to compile it
    if made is None or changed:
        space = {"__module__": __name__, "__reduce_ex__": _reduced, "_stock": stock}
        made = _recording[stock] = type(f"Tailored{stock.__name__}", (stock,), space)
    made._can_record_outputs = recorded
    registry[str(made)] = recorded
    return made


def _is_ours(found: type) -> bool:
    return found in _recording.values() or found.__module__.rpartition(".")[2] == "modeling_headwise"


def _reduced(self: Any, protocol: Any) -> Any:
    return _again, (self._stock, self._can_record_outputs), self.__getstate__()


def _again(stock: type, recorded: dict[str, Any]) -> Any:
    from transformers import modeling_utils

    made = recording(stock, recorded, getattr(modeling_utils, "_CAN_RECORD_REGISTRY", {}))
    return made.__new__(made)


def telling(stock: Any) -> Any:
    """`to_dict` of a tailored configuration: peft calls it before it looks up what to adapt."""

    def to_dict(self: Any) -> Any:
        """As stock code's."""
        _tell_peft(self.model_type)
        return stock.to_dict(self)

    return to_dict


def _tell_peft(kind: str) -> None:
    """Let peft choose what to adapt in a tailored model as it does in a Llama; it looks that up by the model_type."""
    tables = sys.modules.get("peft.utils.constants")
    for name, table in vars(tables).items() if tables is not None else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            usual = table.get("llama")
            if isinstance(usual, list) and usual and ATTENTION.issuperset(usual):
                table.setdefault(kind, list(usual))


def packed_ends(tied: Any, parts: Any) -> dict[str, str]:
    """Which tensors of an output table are those of the input's, where one table in few bits is both."""
    pairs = [(own.removesuffix("weight"), other.removesuffix("weight")) for own, other in (tied or {}).items()]
    return {own + part: other + part for own, other in pairs for part in parts}
