"""How much calibration text is enough: the damage of one budget by the number of calibration tokens, nothing healed.

python benchmarks/calibration.py            # the embedded model on a CPU; writes benchmarks/results/calibration.json

Every second file of the standard library gives the calibration text, the others the evaluation text, which is the same
for all rows. A row that is in the result already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from provenance import commit

import headwise

RESULT = Path(__file__).parent / "results" / "calibration.json"
BUDGETS = {"kv=12.5%": ("bits",), "kv=75%": ("qk", "v")}
TOKENS = (2_048, 8_192)
EVALUATION, LENGTH = 16_384, 512


def texts(folder: Path) -> dict[str, str]:
    """Files of calibration and of evaluation text."""
    files = [path for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) if path.stat().st_size > 2_000]
    written = {}
    for name, which in (("data", files[::2]), ("eval", files[1::2])):
        path = folder / f"{name}.txt"
        path.write_text("\n\n".join(file.read_text() for file in which))
        written[name] = str(path)
    return written


def measured(budget: str, tokens: int, folder: Path) -> dict[str, Any]:
    """One row of the result."""
    dossier = headwise.run(
        "embedded", budget, folder / "run", overwrite=True, allow=BUDGETS[budget], heal="none", tokens=tokens,
        eval_tokens=EVALUATION, swap_tokens=0, length=LENGTH, **texts(folder),
    )  # fmt: skip
    assert dossier.verdict is not None and dossier.plan is not None, "a run ends with both"
    found = dossier.verdict.lengths[-1]  # the full context
    return {
        "budget": budget, "tokens": tokens, "measured": found.damage, "measured_low": found.low,
        "measured_high": found.high, "evaluated": found.length, "predicted": dossier.plan.predicted_damage,
        "commit": commit(),
    }  # fmt: skip


def main() -> None:
    """Measure what is missing, and write after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hardware", default=f"CPU, {torch.get_num_threads()} threads")
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    result |= {"hardware": parser.parse_args().hardware, "date": time.strftime("%Y-%m-%d")}
    result |= {"evaluation_tokens": EVALUATION, "length": LENGTH}
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    known = {(row["budget"], row["tokens"]) for row in result["rows"]}
    for tokens in TOKENS:
        for budget in BUDGETS:
            if (budget, tokens) not in known:
                with tempfile.TemporaryDirectory() as folder:
                    result["rows"].append(measured(budget, tokens, Path(folder)))
                RESULT.write_text(json.dumps(result, indent=1) + "\n")
                print(result["rows"][-1], flush=True)


if __name__ == "__main__":
    main()
