"""The modules that reshaped models run on. `modeling_headwise.py` is self-contained and copied into saved models."""

from __future__ import annotations


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
