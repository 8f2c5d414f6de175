"""Writes the generated parts of docs/ARCHITECTURE.md.

python docs/architecture.py          # the rooms: from the table in tests/test_layers.py
python docs/architecture.py --walk   # also the walk: traces one small run, which takes a minute or two
"""

from __future__ import annotations

import ast
import runpy
import sys
import tempfile
from fnmatch import fnmatch
from html import escape
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headwise"
PAGE, PICTURE = ROOT / "docs" / "ARCHITECTURE.md", ROOT / "docs" / "rooms.svg"
COMMAND = "headwise run embedded --budget kv=75%"
SMALL = "--tokens 1024 --eval-tokens 512 --swap-tokens 64 --length 64 --context 64"  # the same path on less text
# A hop: a public function of these files beneath which so many different functions of the package run.
FILES = (
    "cli/commands.py", "api.py", "pipeline.py", "preflight/__init__.py", "stages/*.py", "probes/[a-z]*.py",
    "strategies/__init__.py", "strategies/exact.py", "cuts/__init__.py", "heal/__init__.py", "heal/refit.py",
    "checks/certificate.py", "report/__init__.py",
)  # fmt: skip
ASIDE = (  # branches, no stations
    "stages/frontier.py:*", "strategies/exact.py:answers", "stages/report.py:solved", "report/__init__.py:model_card",
    "stages/needed.py:*", "preflight/__init__.py:memory_needed", "cuts/__init__.py:reshape_layer",
    "heal/refit.py:LayerHealer.*",
)  # fmt: skip
FUNCTIONS = 75
PASSES_ON = 0.95  # a function most of whose work is one other hop is left out
MOST_HOPS, MOST_FILES = 25, 20


def main() -> None:
    """Write what was asked for."""
    layers = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))
    PICTURE.write_text(picture(layers["ALLOWED"]))
    put("rooms", rooms_table(layers["ALLOWED"], {"base": layers["FIRST"], "model": layers["MODEL"]}))
    if "--walk" in sys.argv:
        put("walk", walk_table(*hops(traced_calls())))


def put(name: str, text: str) -> None:
    """Replace a generated part of the page."""
    page = PAGE.read_text()
    start, end = f"<!-- {name}: printed by docs/architecture.py -->\n", f"<!-- end of {name} -->"
    before, rest = page.split(start)
    PAGE.write_text(f"{before}{start}\n{text}\n\n{end}{rest.split(end)[1]}")


# The rooms.


def levels(allowed: dict[str, set[str]]) -> dict[str, int]:
    """How many rooms lie below each: 0 for one that imports nothing of the package."""
    found: dict[str, int] = {}
    while len(found) < len(allowed):
        ready = {room for room, below in allowed.items() if room not in found and below <= set(found)}
        found |= {room: 1 + max((found[name] for name in allowed[room]), default=-1) for room in ready}
    return found


def rooms_table(allowed: dict[str, set[str]], groups: dict[str, set[str]]) -> str:
    """A row per room, lowest last, with the rooms it may import; groups are named as one."""
    known = levels(allowed)
    lines = ["| level | room | may import |", "| --- | --- | --- |"]
    for room in sorted(allowed, key=lambda room: (-known[room], room)):
        rest, words = set(allowed[room]), []
        for name, group in groups.items():
            if group <= rest:
                rest, words = rest - group, [*words, f"*{name}*"]
        lines.append(f"| {known[room]} | `{room}` | {', '.join([*words, *sorted(rest)]) or 'nothing'} |")
    named = [f"*{name}*: {', '.join(sorted(group))}." for name, group in groups.items()]
    return "\n".join([*lines, "", " ".join(named)])


def reduced(allowed: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that no chain of other imports implies: enough to draw."""
    below: dict[str, set[str]] = {}
    for room in sorted(allowed, key=levels(allowed).__getitem__):
        below[room] = allowed[room].union(*(below[name] for name in allowed[room]))
    return [
        (room, name)
        for room in sorted(allowed)
        for name in sorted(allowed[room])
        if not any(name in below[other] for other in allowed[room])
    ]


def picture(allowed: dict[str, set[str]]) -> str:
    """Rooms as boxes, level by level, and a line from each to the highest ones that it may import."""
    known, width, step, place = levels(allowed), 1080, 66, {}
    drawn = [room for room in allowed if not room.startswith("_")]
    top = max(known[room] for room in drawn)
    for level, rooms in groupby(sorted(drawn, key=lambda room: (known[room], room)), key=known.__getitem__):
        names = list(rooms)
        for number, room in enumerate(names):
            place[room] = (width * (number + 1) // (len(names) + 1), 24 + step * (top - level))
    lines = [
        f'<path d="M{x} {y + 13}C{x} {y + 40} {u} {v - 40} {u} {v - 13}"/>'
        for (x, y), (u, v) in ((place[room], place[name]) for room, name in reduced(allowed) if room in place)
    ]
    boxes = [
        f'<rect x="{x - 46}" y="{y - 13}" width="92" height="26" rx="5"/>'
        f'<text x="{x}" y="{y + 4}">{escape(room)}</text>'
        for room, (x, y) in place.items()
    ]
    style = (
        "path{fill:none;stroke:#8aa;opacity:.55}rect{fill:#eef3f7;stroke:#567}"
        "text{font:12px sans-serif;text-anchor:middle;fill:#123}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {48 + step * top}"><style>{style}</style>'
        f"{''.join(lines)}{''.join(boxes)}</svg>\n"
    )


# The walk.


class Call(NamedTuple):
    """One call of a function of the package."""

    file: str
    name: str
    caller: int | None  # its number

    @property
    def walked(self) -> bool:
        """Whether it could be a hop: a public function or method of the files in question."""
        inside = any(fnmatch(self.file, pattern) for pattern in FILES)
        aside = any(fnmatch(f"{self.file}:{self.name}", pattern) for pattern in ASIDE)
        return inside and not aside and "<" not in self.name and not self.name.split(".")[-1].startswith("_")


def traced_calls() -> list[Call]:
    """All calls that one small run makes in the package, in order."""
    from headwise.cli.commands import main as run

    calls: list[Call] = []
    stack: list[tuple[FrameType, int]] = []
    prefix = f"{PACKAGE}/"

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            calls.append(
                Call(
                    frame.f_code.co_filename.removeprefix(prefix),
                    frame.f_code.co_qualname,
                    stack[-1][1] if stack else None,
                )
            )
            stack.append((frame, len(calls) - 1))
        elif event == "return" and stack and stack[-1][0] is frame:
            stack.pop()

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [*COMMAND.split(), *SMALL.split(), "--out", f"{folder}/run"]
        sys.setprofile(record)
        try:
            run()
        except SystemExit as end:
            assert end.code in (0, 3), "3: so little text is not verified"
        finally:
            sys.setprofile(None)
    return calls


def hops(calls: list[Call]) -> tuple[list[tuple[int, Call]], list[Call]]:
    """The calls that make up the walk, each with its depth, in order; and those that only pass on to the next."""
    beneath: list[Any] = [set() for _ in calls]
    for number in reversed(range(len(calls))):
        call = calls[number]
        if call.caller is not None:
            beneath[call.caller] |= {(call.file, call.name), *beneath[number]}
        beneath[number] = len(beneath[number])
    first: dict[tuple[str, str], int] = {}
    for number, call in enumerate(calls):
        if call.walked and beneath[number] >= FUNCTIONS:
            first.setdefault((call.file, call.name), number)
    found = set(first.values())
    for number in first.values():
        above = caller_in(calls, number, found)
        if above is not None and beneath[number] >= PASSES_ON * beneath[above]:
            found.discard(above)
    passing = [calls[number] for number in first.values() if number not in found]
    return [(depth(calls, number, found), calls[number]) for number in sorted(found)], passing


def caller_in(calls: list[Call], number: int, hops: set[int]) -> int | None:
    """The nearest hop that a call was made from."""
    above = calls[number].caller
    while above is not None and above not in hops:
        above = calls[above].caller
    return above


def depth(calls: list[Call], number: int, hops: set[int]) -> int:
    """How many hops a call is inside."""
    above = caller_in(calls, number, hops)
    return 0 if above is None else 1 + depth(calls, above, hops)


def walk_table(found: list[tuple[int, Call]], passing: list[Call]) -> str:
    """A row per hop, with the first sentence of its docstring."""
    files = {call.file for _, call in found}
    assert len(found) <= MOST_HOPS and len(files) <= MOST_FILES, f"{len(found)} hops in {len(files)} files"
    lines = ["| hop | file | function | what it does |", "| --- | --- | --- | --- |"]
    for number, (inside, call) in enumerate(found, 1):
        indent = "&nbsp;" * 2 * inside
        lines.append(f"| {number} | `{call.file}` | {indent}`{call.name}` | {summary(call.file, call.name)} |")
    names = ", ".join(f"`{call.file}` `{call.name}`" for call in passing)
    return "\n".join([*lines, "", f"{len(found)} hops in {len(files)} files. They only pass on to the next: {names}."])


def summary(file: str, name: str) -> str:
    """The first sentence of a function's docstring."""
    node: Any = ast.parse((PACKAGE / file).read_text())
    for part in name.split("."):
        node = next(inner for inner in node.body if getattr(inner, "name", None) == part)
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if not text:  # a method of a source: its base class says what it is for
        return summary("stages/source.py", f"Source.{name.rpartition('.')[2]}")
    return text.split(". ")[0].rstrip(".") + "."


if __name__ == "__main__":
    main()
