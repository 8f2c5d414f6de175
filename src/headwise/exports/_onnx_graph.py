"""The ONNX graph of a decoder: written, and compared with the model in whatever engine runs it."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, ModelError
from headwise.exports._asked import ExportOptions, ExportRequest
from headwise.exports._graph import decoder, example, moving, unchanged
from headwise.families import quietly
from headwise.progress import stage

FILE = "model.onnx"
TOLERANCE = 1e-4  # of a log-probability, for a graph in 32 bits
TRIED = ((2, 3, 5), (1, 70, 0), (2, 1, 9))  # rows, new tokens and those before them: a start, a later part, a step


def refuse(options: ExportOptions) -> None:
    """Refuse options that this format has not."""
    if options.type not in ("auto", "f32"):
        raise HeadwiseError(f"--type is '{options.type}'; this format is written in f32: leave --type out.")
    if options.tokenizer != "text":
        raise HeadwiseError("--tokenizer is for GGUF; this format is always given token numbers. Leave it out.")


def write(asked: ExportRequest, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Write the graph with its tokenizer: the names of its cached tensors, and what it holds."""
    graph, family = decoder(asked.model)
    given = example(asked.model, family)
    count = len(given["past"])
    names = [f"{layer}.{part}" for layer in range(count // 2) for part in ("key", "value")]
    with stage(asked.track, "tracing the graph"), torch.no_grad(), quietly(), _silent(), unchanged(asked.model):
        program = torch.onnx.export(
            graph, (), kwargs=given, dynamic_shapes=moving(count), dynamo=True, verbose=False, optimize=True,
            input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{n}" for n in names)],
            output_names=["logits", *(f"present.{n}" for n in names)],
        )  # fmt: skip
    assert program is not None, "the exporter that traces returns a program"
    with stage(asked.track, "writing"):
        weights = sum(parameter.nbytes for parameter in asked.model.parameters())
        program.save(folder / FILE, external_data=weights > 2**30)
        asked.model.config.save_pretrained(folder)
        asked.reader.save_pretrained(folder)
    layers = family.shape_of(asked.model.config).layers
    facts = {
        "bytes": sum(path.stat().st_size for path in folder.glob(f"{FILE}*")),
        "cache_bytes_per_token": sum(4 * layer.kv_heads * (layer.qk_dim + layer.v_dim) for layer in layers),
    }
    return names, facts


@contextmanager
def _silent() -> Iterator[None]:
    """Silence what the exporter says about packages that it does not find, and about names of axes."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def compared(model: Any, run: Any, names: list[str], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """The largest difference between a graph's log-probabilities and ours; a larger one than rounding is refused.

    A cache in bits rounds: a difference in the last bit of a number can become one step of a code.
    """
    graph, family = decoder(model)
    far = 0.0
    for sizes in TRIED:
        given = example(model, family, sizes, seed=1)
        with torch.no_grad():
            ours = graph(**given)[0].double().log_softmax(-1)
        theirs = torch.as_tensor(run(fed(given, names))[0]).double().log_softmax(-1)
        far = max(far, float((ours - theirs).abs().max()))
    if any(layer.coded for layer in family.shape_of(model.config).layers):
        tolerance = math.inf
    if not far <= tolerance:
        raise ModelError(f"the graph gives other answers (log-probabilities differ by up to {far:.1e}); not written.")
    return {"largest_difference": far}


def fed(given: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Inputs by the names that the graph has for them."""
    past = {f"past_key_values.{name}": x.numpy() for name, x in zip(names, given["past"], strict=True)}
    return {**{name: x.numpy() for name, x in given.items() if name != "past"}, **past}
