"""Writes docs/SPEED.md from the committed results of the benchmarks of speed: no figure is typed by hand.

python benchmarks/speed.py          # rewrite docs/SPEED.md
python benchmarks/speed.py --check  # exit 1 if it is not what the results say

Every benchmark named here has a function `section(result)` that tells its result in Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "SPEED.md"
PARTS = (
    "attention",
    "rows",
    "code_widths",
    "generate",
    "latency",
    "cpu_decode",
    "probe_cost",
    "streaming",
    "streamed_bits",
)  # in the page's order
TITLE = """# Speed

Is a cut model faster? One decode step on a GPU, with `headwise.load(..., optimise=True)`:

{summary}

- Half the dimensions of the cache help most at long contexts and large batches, where reading the cache takes most of
  the time.
- A cache in bits saves memory first of all. [Attention to it](#rows-that-heads-share) and whole
  [decode steps](#decode-steps) are faster than those of the uncut model at long contexts and large batches, and slower
  at short ones. [On a CPU](#a-cut-model-on-a-cpu) prompts take longer, and so do decode steps without `optimise=True`.

Below: [kernels](#attention-kernels), [rows that heads share](#rows-that-heads-share), their [bits](#widths-of-codes),
[decode steps](#decode-steps), [latency as a budget](#latency-as-a-budget), [a CPU](#a-cut-model-on-a-cpu),
[the cost of probing](#what-probing-costs),
[models larger than memory](#models-larger-than-memory-benchmarksstreamingpy).

Models that are compared are timed alternately in one run. Every table is printed by `benchmarks/speed.py` from the
committed result of the script that is named above it.
"""


def page() -> str:
    """The whole page; a benchmark without a result is left out."""
    sys.path.insert(0, str(HERE))
    parts = [TITLE.format(summary=importlib.import_module("tables").speed())]
    for name in PARTS:
        result = HERE / "results" / f"{name}.json"
        if result.exists():
            parts.append(importlib.import_module(name).section(json.loads(result.read_text())).strip() + "\n")
    return "\n".join(parts)


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text() == page() else "docs/SPEED.md is stale; run python benchmarks/speed.py")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
