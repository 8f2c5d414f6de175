"""The ONNX graph of a decoder: written, and compared with the model in whatever engine runs it."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, ModelError
from headwise.exports._asked import ExportOptions, ExportRequest
from headwise.exports._graph import GraphDecoder, ShownCache, decoder, example, moving, unchanged
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


def compared(model: Any, run: Any, names: list[str]) -> dict[str, Any]:
    """The largest difference between a graph's log-probabilities and ours; a larger one than rounding is refused.

    `run` gives logits, then keys and values of all layers. A cache in bits rounds: a difference in the last digit of a
    number can become one step of a code, and then an answer differs by far more. So ours is also run on the engine's
    own keys and values, whose codes are the same in both: there nothing but rounding may be left. How often codes
    differ is reported.
    """
    graph, family = decoder(model)
    coded = any(layer.coded for layer in family.shape_of(model.config).layers)
    far, as_run, cached, codes = 0.0, 0.0, 0.0, torch.zeros(2, dtype=torch.long)
    for sizes in TRIED:
        given = example(model, family, sizes, seed=1)
        with torch.no_grad():
            logits, own = graph(**given)
            answer, *theirs = (torch.as_tensor(x) for x in run(fed(given, names)))
            as_run = max(as_run, _apart(logits, answer))
            if coded:
                codes += _codes(model, own, theirs)
                logits, own = GraphDecoder(model, partial(ShownCache, theirs))(**given)
        far = max(far, _apart(logits, answer))
        cached = max([cached, *(float((x - y).abs().max() / x.abs().max()) for x, y in zip(own, theirs, strict=True))])
    if not max(far, cached) <= TOLERANCE:
        told = f"log-probabilities differ by up to {far:.1e}, cached numbers by {cached:.1e} of the largest"
        raise ModelError(f"the graph gives other answers ({told}); not written.")
    differ, every = codes.tolist()
    more = {"largest_difference_as_run": as_run, "codes_that_differ": differ, "codes": every} if coded else {}
    return {"largest_difference": far, **more}


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two models' log-probabilities."""
    return float((ours.double().log_softmax(-1) - theirs.double().log_softmax(-1)).abs().max())


def _codes(model: Any, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> torch.Tensor:
    """How many numbers are read differently from a cache in bits, and how many there are."""
    found = torch.zeros(2, dtype=torch.long)
    for layer in (module for module in model.modules() if getattr(module, "coders", None)):
        at = slice(2 * layer.layer_idx, 2 * layer.layer_idx + 2)
        for coder, x, y in zip(layer.coders, ours[at], theirs[at], strict=True):
            for one in (coder, coder.fine):
                differ = one.rounded(x) != one.rounded(y)
                found += torch.tensor([int(differ.sum()), differ.numel()])
    return found


def fed(given: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Inputs by the names that the graph has for them."""
    past = {f"past_key_values.{name}": x.numpy() for name, x in zip(names, given["past"], strict=True)}
    return {**{name: x.numpy() for name, x in given.items() if name != "past"}, **past}
