"""Command lines with one odd value: every command of Headwise must take it, or refuse it in one line."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from folders import OUT, SOURCE, TEXT
from scenarios import ALLOCATE, DESIGN, GGUF, HEAL, PROBE, RUN, SEARCH, TRAIN, VERIFY

ROW = "arguments"
WORDS = (
    *("", " ", "x", "0", "-1", "1", "3", "0.5", "-0.0", "nan", "inf", "-inf", "1e400", "1e-400", "0x10", "1_000", "½"),
    *("%", "=", ",", ",,1", "1,", "a=b", "kv=", "kv=0%", "kv=-5%", "kv=nan%", "kv=75%@", "params=1e999", "flops=1%"),
    *("latency=90%", "[]", "{}", "null", "*", "~", ".", "..", "/", "/dev/null", "/dev/full", "../../etc/passwd"),
    *("é" * 300, "\udcff", "<script>", "--json", "-", TEXT, SOURCE, f"{SOURCE}/config.json", f"{OUT}/plan.json"),
)
LARGE = ("1000000", "999999999999", str(10**30), "1e300", "9" * 5000)  # where a large number is no long task
WRITTEN = ("--out", "--figures", "--plot", "--overwrite")
ARITHMETIC: tuple[list[str], ...] = (  # commands that answer at once, whatever they are asked
    ["advise", "--width", "768", "--layers", "12", "--context", "1024", "--params", "100M", "--flops", "2e18"],
    ["theory", "bound", "--token-dim", "16", "--dim", "128", "--lags", "4", "--norm", "1.0", "--eps", "0.0"],
    ["theory", "bound", "--token-dim", "16", "--group", "2x16", "--rho", "geometric:0.5", "--lags", "3"],
    ["theory", "allocate", "--dim", "64", "--token-dim", "8", "--lags", "3", "--head-step", "1", "--dim-step", "2"],
    ["theory", "saturation", "--logit-bound", "2.0", "--lengths", "4,16", "--logit-error", "0.1", "--draws", "2"],
    ["theory", "conditioning", "--tokens", "16", "--head-dim", "4", "--heads", "1,2", "--draws", "2", "--seed", "1"],
    ["families", "--json"],
    ["kernels", "--json"],
    ["show", f"{OUT}/plan.json"],
    ["show", f"{OUT}/verdict.json"],
    ["reproduce", "nothing", "--size", "tiny", "--out", OUT],
    [*VERIFY, "--engine", "vllm"],
    [*VERIFY, "--engine", "nothing", "--max-loss", "5%"],
    ["report", OUT, "--figures", "pictures"],
    ["report", OUT, SOURCE, "--out", "compare.html"],
    [*ALLOCATE, "--strategy", "exact", "--allow", "qk,v", "--multiple", "2"],
)
WORKING: tuple[list[str], ...] = (  # commands for which a large number can mean much work
    RUN,
    PROBE,
    TRAIN,
    DESIGN,
    SEARCH,
    GGUF,
    [*GGUF, "--type", "f16", "--tokenizer", "ids", "--out", "model.gguf"],
    ["export", SOURCE, "--to", "gguf", "--out", "x.gguf"],
    ["export", OUT, "--to", "onnx"],
    [*HEAL, "--heal", "blockwise", "--heal-option", "steps=2"],
    ["reshape", OUT],
    ["demo", "--out", OUT],
)


def cases(draw: random.Random) -> Iterator[tuple[list[str], str]]:
    """Command lines without end, each with what was changed."""
    while True:
        large = draw.random() < 0.7
        command = list(draw.choice(ARITHMETIC if large else WORKING))
        at = draw.randrange(1, len(command))
        value: Any = draw.choice((*WORDS, *LARGE) if large else WORDS)
        if command[at - 1] in (*WRITTEN, "export") and value.startswith((".", "/", "~")):
            continue  # it may write where it is told to
        way = draw.random()
        if command[0] == "demo":
            at, way = len(command) - 1, 1.0  # as it is, it takes minutes
            value = draw.choice((TEXT, SOURCE, f"{OUT}/plan.json"))
        if way < 0.1:
            yield [*command[:at], *command[at + 1 :]], f"without {command[at]}"
        elif way < 0.2:
            yield [*command[:at], value, *command[at:]], f"{value[:40]!r} before {command[at]}"
        else:
            yield [*command[:at], value, *command[at + 1 :]], f"{value[:40]!r} for {command[at]}"
