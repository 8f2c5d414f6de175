"""Makes the benchmarks' calibration and evaluation texts from a folder of public data sets.

    python benchmarks/texts.py DATA OUT

DATA holds `text/` (WikiText-2 validation, TinyStories sample, film reviews, novels), `glue/` and `zero-shot/`. Written:
`wikitext-all.txt` (WikiText-2's validation articles), `wikitext-eval.txt` (their second half), `mix.txt` (their first
half among seven kinds of text), `other.txt` (the same without WikiText), `prose.txt` (novels and reviews only: another
kind of text than the evaluation's), `code.txt` (modules of Python's standard library, of the version that runs this),
`stories-cal.txt` and `stories-eval.txt`, and `heal.txt` for healings that read much: it begins like the mix, with more
of the same after it, without HellaSwag, which healed models are asked about. `heal-other.txt` begins like `other.txt`,
with more of its kinds after it and none of WikiText.
"""

from __future__ import annotations

import argparse
import bz2
import itertools
import lzma
import random
import re
import sysconfig
from pathlib import Path

END = "<|endoftext|>"
CHARACTERS = {  # of each kind in the mix
    "wiki": 400_000, "novels": 250_000, "reviews": 250_000, "news": 300_000, "howto": 250_000, "stories": 60_000,
    "code": 120_000,
}  # fmt: skip

LONGER = {"wiki": 10**7, "novels": 10**7, "reviews": 12 * 10**6, "news": 10**7, "stories": 10**7, "code": 10**7}
NOVELS, REVIEWS = 6 * 10**6, 6 * 10**6  # characters that follow in `heal-other.txt`, beside all news, stories and code


def unpacked(path: Path) -> str:
    """The text of an xz file."""
    return lzma.decompress(path.read_bytes()).decode()


def chunks(text: str, size: int) -> list[str]:
    """A long text in pieces."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def columns(path: Path, wanted: list[int]) -> list[str]:
    """The longer sentences of some columns of a tab-separated file."""
    rows = [line.split("\t") for line in path.read_text(errors="replace").split("\n")[1:]]
    return [row[c] for row in rows for c in wanted if c < len(row) and len(row[c]) > 40]


def howto(path: Path) -> list[str]:
    """HellaSwag contexts with their right ending: six lines an item (context, label, four endings)."""
    lines = bz2.decompress(path.read_bytes()).decode().split("\n")
    items = [lines[i : i + 6] for i in range(0, len(lines) - 5, 6)]
    return [f"{item[0]} {item[2 + int(item[1])]}" for item in items if item[1].isdigit()]


def grouped(sentences: list[str], count: int) -> list[str]:
    """Short texts put together into longer ones."""
    return ["\n".join(sentences[i : i + count]) for i in range(0, len(sentences), count)]


def stories(path: Path) -> list[str]:
    """Stories with single newlines, as the stories models were trained."""
    return [story.strip().replace("\n\n", "\n") for story in path.read_text().split(END)]


def kinds(data: Path, articles: list[str], tales: list[str]) -> dict[str, list[str]]:
    """The documents of every kind of text."""
    reviews = _reviews(data)
    news = columns(data / "glue" / "RTE" / "train.tsv", [1]) + columns(data / "glue" / "MRPC" / "train.tsv", [3, 4])
    news += columns(data / "glue" / "STS-B" / "train.tsv", [7, 8])
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return {
        "wiki": articles,
        "novels": chunks(unpacked(data / "text" / "gutenberg-24-novels.txt.xz"), 6000),
        "reviews": ["\n\n".join(reviews[i : i + 5]) for i in range(0, len(reviews) - 5, 200)],
        "news": grouped(news, 30),
        "howto": grouped(howto(data / "zero-shot" / "hellaswag_val_full.txt.bz2"), 20),
        "stories": tales,
        "code": [path.read_text(errors="replace")[:6000] for path in library],
    }


def _reviews(data: Path) -> list[str]:
    return unpacked(data / "text" / "imdb-reviews.txt.xz")[:30_000_000].split("\n")


def _more_of_other(data: Path, found: dict[str, list[str]], known: set[str]) -> dict[str, list[str]]:
    """More of the kinds of `other.txt`; the reviews are neighbours of those in `kinds`."""
    reviews = _reviews(data)
    near = ["\n\n".join(reviews[i : i + 10]) for i in range(5, len(reviews) - 10, 200)]
    near += ["\n\n".join(reviews[i : i + 40]) for i in range(20, len(reviews) - 40, 200)]
    more = {"novels": _some(found["novels"], NOVELS), "reviews": _some(near, REVIEWS)}
    more |= {kind: found[kind] for kind in ("news", "howto", "stories", "code")}
    return {kind: [text for text in texts if text not in known] for kind, texts in more.items()}


def _some(documents: list[str], characters: int) -> list[str]:
    """The first documents, until they have so many characters."""
    ends = itertools.accumulate(map(len, documents))
    return [text for text, end in zip(documents, ends, strict=True) if end - len(text) < characters]


def written(data: Path) -> dict[str, list[str]]:
    """The documents of every file; the draws are seeded, each in its place."""
    draw = random.Random(0)
    articles = re.split(r"\n(?= = [^=]+ = \n)", (data / "text" / "wikitext2-valid.txt").read_text())
    half = len(articles) // 2
    tales = stories(data / "text" / "tinystories-sample.txt")
    most = int(len(tales) * 0.7)
    found = kinds(data, articles[:half], tales[:most])
    chosen: dict[str, list[str]] = {}
    for kind, documents in found.items():
        draw.shuffle(documents)
        chosen[kind] = _some(documents, CHARACTERS[kind])
    first = _mixed(chosen, random.Random(2), but="howto")
    known = set(first)
    longer = {kind: _some([text for text in found[kind] if text not in known], size) for kind, size in LONGER.items()}
    other = _mixed(chosen, random.Random(1), but="wiki")
    more = _more_of_other(data, found, set(other))
    prose = [text for pair in zip(found["novels"], found["reviews"], strict=False) for text in pair]
    return {
        "wikitext-all": articles,
        "wikitext-eval": articles[half:],
        "mix": _mixed(chosen, draw),
        "other": other,
        "prose": prose[:400],
        "code": found["code"],
        "heal": first + _mixed(longer, random.Random(3)),
        "heal-other": other + _mixed(more, random.Random(4)),
        "stories-cal": tales[:most],
        "stories-eval": tales[most:],
    }


def _mixed(texts: dict[str, list[str]], draw: random.Random, but: str | None = None) -> list[str]:
    """All documents but those of a kind, in an order that is drawn."""
    found = [text for kind, some in texts.items() if kind != but for text in some]
    draw.shuffle(found)
    return found


def main() -> None:
    """Write the texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, documents in written(asked.data).items():
        (asked.out / f"{name}.txt").write_text(END.join(documents))
        print(f"{name}: {len(documents)} documents, {sum(map(len, documents)):,} characters")


if __name__ == "__main__":
    main()
