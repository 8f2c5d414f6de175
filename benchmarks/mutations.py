"""Damaged copies of files, drawn with a seed: flipped and lost bytes, other values, deep nesting, lying headers.

Pure Python; `tests/test_damaged_files.py` and `benchmarks/faults.py` share it.

>>> [name for name, _ in mutations(0, "json", b'{"a": 1}', 3)]
['number at a', 'another kind at a', 'remove a']
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 7, 10**5, 10**9, 2**63, 10**400, -(10**30), 0.5, 1e308, float("nan"), float("inf"), -1e-300)
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "../../../etc/passwd", "\0", "\ud800", "é" * 300, [], {}, [[]], [None], {"a": None},
    [1, "a"], "<script>", "1e5", {"headwise": "Plan"},
)  # fmt: skip
PLACES = ("missing", "empty", "folder", "pipe", "loop", "dangling")  # what can stand where a file was


def mutations(seed: int, kind: str, content: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """So many damaged copies of a file's content, each with a name. Kinds: json, safetensors, and bytes for others."""
    rng = random.Random(f"{seed} {kind} {len(content)}")
    for _ in range(count):
        way = rng.random()
        if kind == "json" and way < 0.75:
            yield _json(rng, content)
        elif kind == "safetensors" and way < 0.6:
            yield _safetensors(rng, content)
        else:
            yield _bytes(rng, content)


def kind_of(path: Path) -> str:
    """The kind of a file by its name, as `mutations` takes it."""
    return {".json": "json", ".safetensors": "safetensors"}.get(path.suffix, "bytes")


def put(path: Path, place: str) -> None:
    """Put something else where a file was; one of PLACES."""
    path.unlink()
    if place == "empty":
        path.touch()
    elif place == "folder":
        path.mkdir()
    elif place == "pipe":
        os.mkfifo(path)
    elif place == "loop":
        path.symlink_to(path.name)
    elif place == "dangling":
        path.symlink_to("nowhere")


def remove(path: Path) -> None:
    """Remove whatever `put` has put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _bytes(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Bytes that are flipped, lost, repeated or added."""
    if not content:
        return "add", rng.randbytes(16)
    at, size = rng.randrange(len(content)), rng.choice((1, 1, 2, 8, 64, 1024))
    ways: dict[str, Callable[[], bytes]] = {
        "flip": lambda: content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :],
        "random bytes": lambda: content[:at] + rng.randbytes(size) + content[at + size :],
        "truncate": lambda: content[:at],
        "cut out": lambda: content[:at] + content[at + size :],
        "repeat": lambda: content[:at] + content[at : at + size] + content[at:],
        "zeros": lambda: content[:at] + bytes(min(size, len(content) - at)) + content[at + size :],
        "not UTF-8": lambda: content[:at] + b"\xff\xfe\x80" + content[at:],
        "byte order mark": lambda: b"\xef\xbb\xbf" + content,
        "nothing": lambda: b"",
        "appended": lambda: content + rng.randbytes(size),
    }
    name = rng.choice(list(ways))
    return name, ways[name]()


def _json(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """One value replaced, removed, nested or doubled; or the whole text nested."""
    try:
        data = json.loads(content)
    except ValueError:
        return _bytes(rng, content)
    if rng.random() < 0.05:
        deep = rng.choice((100, 2_000, 200_000))
        return f"nest all {deep}", b"[" * deep + content + b"]" * deep
    places = list(_places(data))
    if not places:
        return "another value", json.dumps(rng.choice(OTHERS)).encode()
    inside, key = rng.choice(places)
    name = _change(rng, inside, key)
    return name, json.dumps(data).encode()


def _change(rng: random.Random, inside: Any, key: Any) -> str:
    """Damage one place of a parsed value."""
    value, way = inside[key], rng.random()
    if way < 0.35:
        inside[key] = rng.choice(NUMBERS)
        return f"number at {key}"
    if way < 0.6:
        inside[key] = rng.choice(OTHERS)
        return f"another kind at {key}"
    if way < 0.75:
        del inside[key]
        return f"remove {key}"
    if way < 0.85 and isinstance(value, (int, float)) and not isinstance(value, bool):
        inside[key] = value * rng.choice((-1, 2, 3, 1000)) + rng.choice((0, 1))
        return f"other number at {key}"
    if way < 0.9:
        for _ in range(rng.choice((3, 100, 500))):
            value = [value]
        inside[key] = value
        return f"nest {key}"
    if isinstance(inside, list):
        inside.extend([value] * rng.choice((1, 2, 1000)))
        return "repeat an item"
    inside[f"{key}_"] = value
    return "add a field"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a parsed value, as what it is in and its key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _safetensors(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """A header that lies, or numbers that are none."""
    length = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + length], content[8 + length :]
    way = rng.random()
    if way < 0.5:
        name, header = _json(rng, header)
        return f"header: {name}", len(header).to_bytes(8, "little") + header + body
    if way < 0.65:
        said = rng.choice((0, 1, length - 1, length + 1, 2**32, 2**63))
        return "length of the header", (said % 2**64).to_bytes(8, "little") + content[8:]
    at = rng.randrange(max(1, len(body) - 4)) // 4 * 4
    odd = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"))  # NaN, infinity, the largest
    return "odd numbers", content[: 8 + length] + body[:at] + odd + body[at + 4 :]
