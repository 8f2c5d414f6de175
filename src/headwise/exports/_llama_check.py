"""Compares a GGUF file, as llama.cpp runs it, with the model that it was written from."""

import math
from pathlib import Path
from typing import Any

import torch

from headwise.errors import ModelError
from headwise.exports import _llama_cpp
from headwise.exports._asked import ExportRequest
from headwise.progress import note, stage

TEXTS = (
    "Once upon a time, there were 3 cats (and 1,234,567 mice).\n\n  \"It's a test!\" -- she said; \u00c9mile didn't.",
    "def self_attention(x_in, n_heads=12):\n    # tabs\tand   spaces\n    return {'a': [x_in ** 2, 0x1F, 3.14e-10]}\n",
    "\u4f60\u597d\uff0c\u4e16\u754c \u043f\u0440\u0438\u0432\u0435\u0442 \u2192 caf\u00e9 na\u00efve \U0001f600 https://example.org/a_b?c=d%20e",
)
TOKENS = 24  # of the row that is scored
TOP = 20  # most likely tokens that are compared
TOLERANCE = {"f32": 0.01, "f16": 0.05, "bf16": 0.2}  # of a log-probability; types with fewer bits are only measured


def check(asked: ExportRequest, path: Path, kind: str, text: bool) -> dict[str, Any] | None:
    """How far llama.cpp's answers are from ours; a file that differs in more than rounding is refused."""
    if not _llama_cpp.installed():
        note(f"the file was not run: type pip install {_llama_cpp.ENGINE} to have it checked in llama.cpp.")
        return None
    row = [int(number) for number in asked.reader(TEXTS[0] + TEXTS[1])["input_ids"][:TOKENS]]
    with stage(asked.track, "running it in llama.cpp"):
        texts, words = (TEXTS if text else ()), len(asked.model.get_input_embeddings().weight)
        found = _llama_cpp.ask(path, 64, texts=texts, rows=[row], top=TOP, words=words, letter=letter(asked.reader))
    for each, tokens in zip(texts, found["tokens"], strict=True):
        ours = asked.reader(each, add_special_tokens=False)["input_ids"]
        if tokens != ours:
            raise ModelError(
                f"llama.cpp splits text into other tokens than this model's tokenizer ({tokens[:6]}... for "
                f"{ours[:6]}...). Add --tokenizer ids for a file that is given token numbers in place of text."
            )
    far, loss, theirs = compared(asked.model, row, found["scores"][0])
    if not far <= TOLERANCE.get(kind, math.inf):
        raise ModelError(f"llama.cpp gives other answers (log-probabilities differ by up to {far:.3f}); not written.")
    return {"engine": _llama_cpp.ENGINE, "largest_difference": far, "nats": loss, "nats_in_engine": theirs}


def letter(tokenizer: Any) -> int:
    """A token that is a letter."""
    return int(tokenizer("a", add_special_tokens=False)["input_ids"][-1])


@torch.no_grad()
def compared(model: Any, row: list[int], scores: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The largest difference of the likely tokens' log-probabilities, and both mean losses in nats per token."""
    ours = model(torch.tensor([row], device=model.device)).logits[0, :-1].double().log_softmax(-1)
    far = max(abs(float(ours[place, token]) - value) for place, at in enumerate(scores) for token, value in at["top"])
    own = -ours.gather(1, torch.tensor(row[1:])[:, None]).mean()
    return far, float(own), -sum(at["own"] for at in scores) / len(scores)
