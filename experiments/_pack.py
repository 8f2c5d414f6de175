"""Packs what the experiments of the second paper train on into one small folder, so that it can travel to a GPU.

    python -m experiments._pack --shared ../shared/data --cifar cifar10.npz --corpus carry/corpus --out carry/b

Each of the three may be left out.

Text becomes tokens of two bytes, images become mosaics in JPEG (the same slightly lossy images for every model), GLUE
becomes token lists. Everything is seeded and compressed; experiments read it through `experiments._data`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headwise.types import write_atomically

VOCABULARY = 4096
SPECIAL = ("<|end|>", "<|mask|>", "<|sep|>", "<|pad|>", "<|class|>")  # tokens 0 to 4
TEXT_TOKENS, CODE_TOKENS, VALID_TOKENS = 36_000_000, 8_000_000, 262_144
TRAIN_IMAGES, TEST_IMAGES = 50_000, 10_000
SIDE, QUALITY = 20, 95  # images along a mosaic's edge; JPEG quality
SAMPLE_CHARACTERS = 8_000_000  # that the tokenizer is made from
LONGEST = 128  # tokens of a GLUE example
MOST_EXAMPLES = 24_000  # of one task
COLUMNS = {"CoLA": (3, None, 1), "SST-2": (0, None, 1), "MRPC": (3, 4, 0), "RTE": (1, 2, 3), "STS-B": (7, 8, 9)}
LABELS = {"0": 0, "1": 1, "entailment": 1, "not_entailment": 0}
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1}]  # numbers of two bytes


def english(shared: Path, seed: int = 0) -> tuple[list[str], list[str]]:
    """Pieces of novels and film reviews in a seeded order; the end of the novels and the last reviews are held out."""
    with lzma.open(shared / "text/gutenberg-24-novels.txt.xz", "rt", encoding="utf-8") as file:
        novels = file.read()
    with lzma.open(shared / "text/imdb-reviews.txt.xz", "rt", encoding="utf-8") as file:
        reviews = file.read()
    border = len(novels) * 95 // 100
    prose = [novels[at : at + 20_000] for at in range(0, border, 20_000)]
    said = [text for text in reviews.replace("<br />", " ").split("\n") if text.strip()]
    held = [novels[at : at + 20_000] for at in range(border, len(novels), 20_000)] + said[-2_000:]
    rng = random.Random(seed)
    pieces = prose + said[:-2_000]
    rng.shuffle(pieces)
    rng.shuffle(held)
    return pieces, held


def train_tokenizer(pieces: list[str]) -> Tokenizer:
    """A byte-level BPE of English with the special tokens in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(pieces), trainer)
    return tokenizer


def _some(pieces: list[str]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for piece in pieces:
        if left <= 0:
            return
        left -= len(piece)
        yield piece


def encode(tokenizer: Tokenizer, pieces: list[str], count: int) -> np.ndarray[Any, Any]:
    """The first `count` tokens of the pieces, each with the end marker in front."""
    found: list[int] = []
    for piece in pieces:
        found.append(0)
        found += tokenizer.encode(piece).ids
        if len(found) >= count:
            break
    return np.array(found[:count], dtype=np.uint16)


def write_tokens(out: Path, name: str, tokens: np.ndarray[Any, Any]) -> None:
    write_atomically(out / f"{name}.u16.xz", lzma.compress(tokens.astype("<u2").tobytes(), filters=FILTERS))


def glue(shared: Path, tokenizer: Tokenizer, seed: int = 0) -> dict[str, Any]:
    """Every task's examples as token lists with labels: class, first text, separator, second text."""
    found: dict[str, Any] = {}
    for task, (first, second, label) in COLUMNS.items():
        found[task] = {}
        for part in ("train", "dev"):
            with (shared / "glue" / task / f"{part}.tsv").open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
            rows = rows if task == "CoLA" else rows[1:]  # the only file without a heading
            random.Random(seed).shuffle(rows)
            examples = []
            for row in rows[:MOST_EXAMPLES]:
                ids = [4, *tokenizer.encode(row[first].strip()).ids]
                if second is not None:
                    ids += [2, *tokenizer.encode(row[second].strip()).ids]
                answer = row[label].strip()
                examples.append([ids[:LONGEST], round(float(answer)) if task == "STS-B" else LABELS[answer]])
            found[task][part] = examples
    return found


def mosaics(images: np.ndarray[Any, Any]) -> list[bytes]:
    """Images of 32 x 32 in squares, as JPEG; edges of images are edges of JPEG's blocks, so none bleeds."""
    from PIL import Image

    found = []
    for at in range(0, len(images), SIDE * SIDE):
        part = np.zeros((SIDE * SIDE, 32, 32, 3), dtype=np.uint8)
        part[: len(images[at : at + SIDE * SIDE])] = images[at : at + SIDE * SIDE]
        square = part.reshape(SIDE, SIDE, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(SIDE * 32, SIDE * 32, 3)
        file = io.BytesIO()
        Image.fromarray(square).save(file, "JPEG", quality=QUALITY, subsampling=0, optimize=True)
        found.append(file.getvalue())
    return found


def cifar(path: Path, seed: int = 0) -> bytes:
    """A seeded selection of CIFAR-10 as one archive."""
    everything, rng, arrays = np.load(path), np.random.default_rng(seed), {}
    for part, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        chosen = rng.permutation(len(everything[f"y_{part}"]))[:count]
        squares = mosaics(everything[f"x_{part}"][chosen])
        arrays[f"{part}_images"] = np.frombuffer(b"".join(squares), dtype=np.uint8)
        arrays[f"{part}_ends"] = np.cumsum([len(square) for square in squares])
        arrays[f"{part}_labels"] = everything[f"y_{part}"][chosen].astype(np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def code(corpus: Path, out: Path) -> None:
    """The embedded model's corpus, as its own tokenizer sees it."""
    own = Path(sys.modules["headwise"].__file__ or "").parent / "embedded" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(own))
    for part, count in (("train", CODE_TOKENS), ("valid", VALID_TOKENS)):
        with lzma.open(corpus / f"{part}.txt.xz", "rt", encoding="utf-8", newline="") as file:
            files = [text for text in file.read(80_000_000).split("<|endoftext|>") if text]
        random.Random(0).shuffle(files)
        write_tokens(out, f"code-{part}", encode(tokenizer, files, count))


def main() -> None:
    """Pack text, code, GLUE and images into the output folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments._pack", description=__doc__)
    parser.add_argument("--shared", type=Path, help="folder with text/ and glue/: packs English and GLUE")
    parser.add_argument("--cifar", type=Path, help="cifar10.npz with x_train, y_train, x_test, y_test: packs images")
    parser.add_argument("--corpus", type=Path, help="what embedded/corpus.py wrote: packs code")
    parser.add_argument("--out", type=Path, default=Path("carry/b"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cifar is not None:
        write_atomically(options.out / "cifar.npz", cifar(options.cifar))
    if options.corpus is not None:
        code(options.corpus, options.out)
    if options.shared is not None:
        pieces, held = english(options.shared)
        tokenizer = train_tokenizer(pieces)
        write_atomically(options.out / "text-tokenizer.json", tokenizer.to_str())
        write_tokens(options.out, "text-train", encode(tokenizer, pieces, TEXT_TOKENS))
        write_tokens(options.out, "text-valid", encode(tokenizer, held, VALID_TOKENS))
        examples = json.dumps(glue(options.shared, tokenizer), separators=(",", ":"))
        write_atomically(options.out / "glue.json.xz", lzma.compress(examples.encode(), preset=9))
    sizes = {path.name: path.stat().st_size for path in sorted(options.out.iterdir())}
    print("\n".join(f"{size / 1e6:7.1f} MB  {name}" for name, size in sizes.items()))
    print(f"{sum(sizes.values()) / 1e6:7.1f} MB  in all")


if __name__ == "__main__":
    import headwise  # noqa: F401  # its folder holds the embedded tokenizer

    main()
