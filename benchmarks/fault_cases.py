"""Which faults there are, drawn with a seed, and what is counted of their results."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

from folders import Reference
from watched import Change

SHARES = {"point": 0.7, "twice": 0.1, "timed": 0.18, "real": 0.02}  # of --crashes
BESIDE = {"term": 1 / 20, "file_size": 1 / 20, "disk": 1 / 20, "memory": 1 / 40, "pair": 1 / 40}  # more, per crash
WHOLE = ("run", "run, distilled", "run, streamed", "train", "export to GGUF")  # scenarios of what is beside the crashes
LOCK = "headwise-lock"
LISTED = 3  # failures told in words, of one kind in one row

Case = dict[str, Any]


def _turns(groups: list[list[Any]], count: int) -> list[Any]:
    """So many items: one of each group in turn, until all are used up."""
    found = [item for row in itertools.zip_longest(*groups) for item in row if item is not None]
    return found[:count]


def _points(name: str, changes: tuple[tuple[Change, ...], ...], draw: random.Random) -> list[Case]:
    found = []
    for step, row in enumerate(changes):
        for number, change in enumerate(row, 1):
            for action in ("kill", "tear") if change.tears else ("kill",):
                found.append({"kind": "crash", "scenario": name, "step": step, "point": number, "action": action})
    draw.shuffle(found)
    return found


def crash_cases(seed: int, count: int, references: dict[str, Reference]) -> list[Case]:
    """Kills: before changes of files, twice, at random times, of started processes; scenarios take turns."""
    draw = random.Random(seed)
    groups = [_points(name, reference.changes, draw) for name, reference in references.items()]
    found = _turns(groups, round(SHARES["point"] * count))
    timed, real = round(SHARES["timed"] * count), round(SHARES["real"] * count)
    twice = count - len(found) - timed - real
    names = itertools.cycle(references)
    for name, number in zip(names, range(twice + timed + real), strict=False):
        row = references[name].changes
        step = draw.randrange(len(row))
        case: Case = {"kind": "timed", "scenario": name, "step": step, "share": draw.random()}
        if number < twice:
            points = {"point": draw.randint(1, len(row[step])), "again": draw.randint(1, len(row[step]))}
            case = {"kind": "twice", "scenario": name, "step": step, "action": "kill", **points}
        elif number >= twice + timed:
            blow = draw.choice(("SIGKILL", "SIGTERM"))
            case = {"kind": "real", "scenario": name, "signal": blow, "seconds": draw.uniform(3, 9)}
        found.append(case)
    return found


def beside_cases(seed: int, count: int, references: dict[str, Reference]) -> list[Case]:
    """SIGTERM, limits, full disks, two processes."""
    draw, found = random.Random(seed), []
    names = [name for name in WHOLE if name in references] or list(references)[:1]
    for kind, share in BESIDE.items():
        for number, name in zip(range(max(1, round(share * count)) if count else 0), itertools.cycle(names)):
            changes = references[name].changes[0]
            first, last = 2, len(changes)
            if kind == "pair":  # while the first process has the lock; the last changes give it back
                first = 2 + next((place for place, change in enumerate(changes) if LOCK in str(change)), 0)
                last = max(first, last - 3)
            case: Case = {"kind": kind, "scenario": name, "step": 0, "point": draw.randint(first, last)}
            if kind in ("file_size", "memory"):
                case["bytes"] = int(2 ** draw.uniform(*{"file_size": (4, 18), "memory": (20, 28)}[kind]))
            if kind == "disk":
                case |= {"where": ("the run", "TMPDIR")[number // 2 % 2], "bytes": 4096 * draw.randint(0, 120)}
            found.append(case)
    return found


def named(case: Case) -> Case:
    """The case with a name that says all about it."""
    return case if "id" in case else {**case, "id": "/".join(str(value) for value in case.values())}


def words_of(case: Case, references: dict[str, Reference]) -> str:
    """What was done, so that a person can do it again."""
    asked = {k: v for k, v in case.items() if k not in ("id", "kind", "scenario", "step", "point")}
    words = f"{case['kind']} in '{case['scenario']}'"
    if "point" in case:
        row = references[case["scenario"]].changes[case["step"]]
        if case["point"] <= len(row):
            change = row[case["point"] - 1]
            words += (
                f", step {case['step'] + 1}, before change {case['point']} of {len(row)} ({change.event} {change.path})"
            )
    return ", ".join([words, *(f"{name} {value}" for name, value in asked.items())])


# What is counted.


def kinds_of(row: Case) -> set[str]:
    """Kinds of problems of a case."""
    return {problem.split(":")[0] for problem in row["problems"]}


def tally(rows: list[Case], problems: tuple[str, ...]) -> Case:
    """Counts over cases; a case with several problems of a kind counts once."""
    found = Counter(kind for row in rows for kind in kinds_of(row))
    return {"cases": len(rows), **{name: found.pop(name, 0) for name in problems}, **found}


CRASHED, ENDED = ("stuck", "lost", "different", "left"), ("end", "stuck", "lost", "different", "left")
DAMAGED = ("traceback", "hang", "outside", "crash")
KILLS = ("crash", "twice", "timed", "real")


def summary(rows: list[Case], references: dict[str, Reference], asked: int) -> Case:
    """Counts by scenario and kind, and failures in words."""
    kills = [row for row in rows if row["kind"] in KILLS]
    damaged = [row for row in rows if row["kind"] == "damage"]
    by_scenario = {
        name: {
            "changes": sum(map(len, reference.changes)),
            **{kind: sum(r["row"] == name and r["kind"] == kind for r in kills) for kind in KILLS},
            **tally([row for row in kills if row["row"] == name], CRASHED),
        }
        for name, reference in references.items()
    }
    beside = {
        kind: {"impossible": sum("impossible" in r for r in found), **tally(found, ENDED)}
        for kind in BESIDE
        if (found := [row for row in rows if row["kind"] == kind])
    }
    files = {
        name: {
            **{end: sum(r.get("ended") == end for r in found) for end in ("accepted", "refused")},
            **tally(found, DAMAGED),
        }
        for name in sorted({row["row"] for row in damaged})
        if (found := [row for row in damaged if row["row"] == name])
    }
    return {
        "cases": len(rows),
        "asked": asked,
        "crashes": tally(kills, CRASHED),
        "scenarios": by_scenario,
        "beside": beside,
        "mutations": tally(damaged, DAMAGED),
        "files": files,
        **failures(rows),
    }


def failures(rows: list[Case]) -> Case:
    """The first few of every kind in every row, in words, and how many there were."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for kind in sorted(kinds_of(row)):
            first, *others = [problem for problem in row["problems"] if problem.split(":")[0] == kind]
            more = f" (and {len(others)} more)" if others else ""
            words = f"{row.get('words', row['id'])}: {first}{more}"
            found.setdefault((row["kind"], str(row["row"]), kind), []).append(words)
    listed = [words for group in found.values() for words in group[:LISTED]]
    return {"failures": listed, "failures_in_all": sum(map(len, found.values()))}
