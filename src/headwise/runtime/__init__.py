"""The modules that reshaped models run on. `modeling_headwise.py` is self-contained and copied into saved models."""
