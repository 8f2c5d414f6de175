"""Trains the tokenizer of the embedded model: byte-level BPE with 4096 tokens, for Python source.

Bytes are the alphabet, so every text round-trips exactly. Runs of spaces are pieces of their own, so that an
indentation becomes one token; words take at most one leading space and digits stay in groups of up to three.

    python embedded/tokenizer.py --corpus carry/corpus --out carry/tokenizer
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
MAX_POSITIONS = 1024
SAMPLE_BYTES = 20_000_000
# A line break with the indentation after it is split so: breaks together, then spaces together; the last space
# before a word or a sign stays with it.
PIECES = r"[\r\n]+|\t+| {2,}(?=\S)| ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+| +|\s"
SAMPLES = (
    "def f(x):\n    if x:\n        return [1, 2,\t3]\n\n\nclass A:\n    pass\n",
    "# Ünïcode: žluťoučký kůň, 日本語, 🐍🚀\nname = 'naïve'\r\n\t\tx  =   12345  \n",
    "  leading and trailing spaces   \n\n   \n",
    'print(f"{value!r:>{width}}", end="")  # it\'s\n',
)


def sample(corpus: Path, size: int, seed: int) -> list[str]:
    """Random files of the training part, `size` characters together."""
    with lzma.open(corpus / "train.txt.xz", "rt", encoding="utf-8", newline="") as file:
        texts = file.read().split(END_OF_TEXT)
    random.Random(seed).shuffle(texts)
    total, chosen = 0, []
    for text in texts:
        chosen.append(text)
        total += len(text)
        if total >= size:
            break
    return chosen


def train(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE trained on `texts`, with the end marker as token 0."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        **special,
    )
    wrapped.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)  # the name below is the one that every version of transformers knows
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def check(out: Path, texts: list[str]) -> float:
    """Assert that the saved tokenizer is exact on `texts`; its bytes per token."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer))
    assert ids == (0, 0, 0, VOCABULARY), ids
    tokens = 0
    for text in texts:
        encoded = tokenizer(text, verbose=False)["input_ids"]
        assert tokenizer.decode(encoded) == text, f"does not round-trip: {text[:80]!r}"
        assert 0 not in encoded, "a token was added"
        tokens += len(encoded)
    return sum(len(text.encode()) for text in texts) / tokens


def main() -> None:
    """Parse the arguments, train, save and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = sample(options.corpus, SAMPLE_BYTES, options.seed)
    save(train(iter(texts)), options.out)
    with lzma.open(options.corpus / "valid.txt.xz", "rt", encoding="utf-8", newline="") as file:
        held_out = [text for text in file.read().split(END_OF_TEXT) if text]
    check(options.out, list(SAMPLES))
    print(f"{check(options.out, held_out):.3f} bytes per token on the held-out packages")


if __name__ == "__main__":
    main()
