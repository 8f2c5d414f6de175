"""The modules that reshaped models run on. `modeling_headwise.py` is self-contained and copied into saved models."""

from __future__ import annotations

import json
from pathlib import Path

CODE = "modeling_headwise.py"


def foreign_code(folder: Path) -> str | None:
    """The first file of a model folder that could run and is not ours, byte for byte; None where there is none.

    A configuration may name no other code either, neither beside it nor in another repository.
    """
    own = (Path(__file__).parent / CODE).read_bytes()
    for path in sorted(folder.rglob("*.py")):
        if path != folder / CODE or not path.is_file() or path.read_bytes() != own:
            return path.relative_to(folder).as_posix()
    try:
        named = json.loads((folder / "config.json").read_bytes()).get("auto_map") or {}
        texts = [str(text) for text in named.values()]
    except (OSError, ValueError, AttributeError, RecursionError):
        return "config.json"
    ours = all(text.startswith(f"{Path(CODE).stem}.") and "--" not in text for text in texts)
    return None if ours else "config.json"


def register(kind: str | None = None) -> None:
    """Tell transformers' Auto classes about tailored models, so that plain `from_pretrained` loads them. Idempotent.

    Without a kind only what tailored configurations are called is registered, and models when one is asked for.
    """
    import transformers

    from headwise.runtime.modeling_headwise import ANATOMY, classes

    for name in ANATOMY if kind is None else (kind,):
        try:
            made = classes(name)
        except (ImportError, RuntimeError):  # of timm, where it is installed but does not load
            if kind is not None or name != "timm_wrapper":
                raise
            continue
        config = made["AutoConfig"]
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto, cls in made.items():
            if auto != "AutoConfig":
                getattr(transformers, auto).register(config, cls, exist_ok=True)
