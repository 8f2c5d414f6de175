"""The modules that reshaped models run on. `modeling_headwise.py` is self-contained and copied into saved models."""

from __future__ import annotations


def register() -> None:
    """Tell transformers' Auto classes about tailored models, so that plain `from_pretrained` loads them. Idempotent."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from headwise.runtime.modeling_headwise import CLASSES

    for config, decoder, with_head in CLASSES.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, decoder, exist_ok=True)
        AutoModelForCausalLM.register(config, with_head, exist_ok=True)
