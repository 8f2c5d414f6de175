"""Text that a model writes, in a file: several processes write side by side, and several runs read what they wrote.

python benchmarks/own_texts.py MODEL --tokens 1000000 --seed 1 --out texts/own-1.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from texts import END

from headwise import families
from headwise.data import own_text
from headwise.files.disk import write_atomically


def main() -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    model, tokenizer = families.load(asked.model, "cuda" if torch.cuda.is_available() else "cpu")
    rows = own_text.written_by(model, max(1, asked.tokens // asked.length), asked.length, asked.seed)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    write_atomically(asked.out, END.join(texts))
    print(f"{asked.out.name}: {rows.numel():,} tokens, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
