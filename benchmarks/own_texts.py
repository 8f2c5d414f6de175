"""Text that a model writes, in a file: several processes write side by side, and several runs read what they wrote.

    python benchmarks/own_texts.py MODEL --tokens 1000000 --seed 1 --out texts/own-1.txt
    python benchmarks/own_texts.py MODEL --start "<|endoftext|>" --beside texts/heal-other.txt --out texts/mixed.txt

With `--beside`, documents of other files stand between those of the model, all in random order. `--start` is the token
that texts begin after, if not the model's own: some chat models begin with the mark of a turn, while their training
texts stood after another token.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from texts import END

import headwise
from headwise import families
from headwise.data import own_text
from headwise.data.files import texts_of
from headwise.files.disk import write_atomically


def main() -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--start", help="a token of the vocabulary; if not given, the model's own first token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="files whose documents are mixed in")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = headwise.load(asked.model, "cuda" if cuda else "cpu", optimise=cuda)
    tokenizer = families.tokenizer_of(asked.model)
    if asked.start is not None and asked.start not in tokenizer.get_vocab():
        parser.error(f"{asked.start} is no token of this model")
    count, start = max(1, asked.tokens // asked.length), tokenizer.get_vocab().get(asked.start)
    rows = own_text.written_by(model, count, asked.length, asked.seed, start=start)
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    texts += [text for file in asked.beside for text in texts_of(file)]
    random.Random(asked.seed).shuffle(texts)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(asked.out, END.join(texts))
    print(f"{asked.out.name}: {rows.numel():,} tokens of its own, {sum(map(len, texts)):,} characters in all")


if __name__ == "__main__":
    main()
