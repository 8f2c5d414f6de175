"""What a model hands its layers beside the stream: masks and positions, made once and used for many rows."""

from __future__ import annotations

from typing import Any


def of_length(context: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What a layer is handed for rows of so many tokens, which may be fewer than the context was made for."""
    tables, mask = context.get("position_embeddings"), context.get("attention_mask")
    found = dict(context)
    if tables is not None:
        found["position_embeddings"] = tuple(table[:, :tokens] for table in tables)
    if mask is not None:
        found["attention_mask"] = mask[..., :tokens, :tokens]
    return found
