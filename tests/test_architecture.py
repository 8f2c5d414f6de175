"""docs/ARCHITECTURE.md is what the code is: its rooms are those of the tests, its walk leads through functions."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from test_layers import ALLOWED, FIRST, MODEL

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
PRINTED = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
AGAIN = "run: python docs/architecture.py"


def test_the_rooms_are_those_that_the_tests_allow() -> None:
    assert PRINTED["rooms_table"](ALLOWED, {"base": FIRST, "model": MODEL}) in PAGE, AGAIN
    assert (ROOT / "docs" / "rooms.svg").read_text() == PRINTED["picture"](ALLOWED), AGAIN


def test_every_room_is_described() -> None:
    prose = PAGE[PAGE.index("<!-- end of rooms -->") :]
    for room in ALLOWED:
        assert room.startswith("_") or f"`{room}`" in prose, f"one sentence about {room}"


def test_the_walk_is_short_and_leads_through_functions_that_exist() -> None:
    hops = re.findall(r"^\| \d+ \| `(\S+)` \| (?:&nbsp;)*`(\S+)` \|", PAGE, re.MULTILINE)
    assert 10 <= len(hops) <= PRINTED["MOST_HOPS"] and len({file for file, _ in hops}) <= PRINTED["MOST_FILES"]
    for file, name in hops:
        assert PRINTED["summary"](file, name), f"{AGAIN} --walk"


def test_the_plug_ins_to_look_at_exist() -> None:
    for folder, example in re.findall(r"`(\w+)/NAME\.py` .* \| `(\w+\.py)` \|", PAGE):
        assert (ROOT / "src" / "headwise" / folder / example).is_file()
