"""Read text with the tokenizer of a cut model, where headwise is not installed and no code of the model may run.

python examples/tokenizer_without_trust.py RUN_FOLDER/model

A cut model brings the code of its layers, so `AutoTokenizer.from_pretrained(folder)` asks whether that code may run.
The tokenizer does not need it: say no in the call, and nothing is asked or run.
"""

from __future__ import annotations

import sys

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def tokenizer_of(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder; no code of the folder is run."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def main(folder: str) -> None:
    """Print a line of text, its tokens, and the text again."""
    tokenizer = tokenizer_of(folder)
    tokens = tokenizer("def add(a, b):")["input_ids"]
    print(tokens, tokenizer.decode(tokens, skip_special_tokens=True), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
