"""How fast the theory is: the softmax Jacobian's norm against a dense eigen-solve, and the exact allocation.

Both sides of a comparison run in this process, one after the other, on one thread; times are medians. Writes
`benchmarks/results/theory.json`.

    OMP_NUM_THREADS=1 python benchmarks/theory.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import timeit
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is loaded: one thread on both sides

import numpy as np  # noqa: E402
import scipy  # noqa: E402

from headwise.probes._jacobian import jacobian_norm  # noqa: E402
from headwise.research.theory import profiles  # noqa: E402
from headwise.research.theory.allocation import allocate  # noqa: E402
from headwise.types import write_atomically  # noqa: E402

LENGTH = 1024
SCALES = (0.5, 3.0, 12.0)  # of Gaussian logits: flat, uneven, peaked
DIM, LAGS = 8192, 64
TOKEN_DIMS = (1, 16, 128)
PROFILES = ("uniform", "geometric:0.9", "power:1.5")
PROMISED_RATIO = 50.0
PROMISED_SECONDS = 5.0
REPEATS = 3
RESULT = Path(__file__).parent / "results" / "theory.json"


def seconds(work: Callable[[], Any], inner: int = 1) -> float:
    """Median time of one call; `inner` calls per measurement where one is too short to time."""
    return statistics.median(timeit.repeat(work, repeat=REPEATS, number=inner)) / inner


def norms(scale: float) -> dict[str, float]:
    """One row of attention both ways."""
    logits = scale * np.random.default_rng(0).standard_normal(LENGTH)
    p = np.exp(logits - logits.max())
    p /= p.sum()

    def dense() -> float:
        return float(np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))[-1])

    slow, fast = seconds(dense), seconds(lambda: jacobian_norm(p), inner=20)
    return {
        "length": LENGTH,
        "logit_scale": scale,
        "dense_seconds": slow,
        "secular_seconds": fast,
        "ratio": slow / fast,
        "difference": abs(dense() - float(jacobian_norm(p))),
    }


def solve(profile: str, token_dim: int, exact_spend: bool) -> dict[str, Any]:
    """One exact allocation."""
    rho = profiles.parse(profile, LAGS)
    found = allocate(rho, DIM, token_dim, exact_spend=exact_spend)
    return {
        "rho": profile,
        "token_dim": token_dim,
        "exact_spend": exact_spend,
        "seconds": seconds(lambda: allocate(rho, DIM, token_dim, exact_spend=exact_spend)),
        "groups": len(found.groups),
        "heads": found.heads,
        "spent": found.spent,
        "error": found.error,
    }


def hardware() -> dict[str, Any]:
    """The processor's own name and how many cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "platform": platform.platform(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
    }


def main() -> None:
    """Time everything, print and record; fail if a promise is broken."""
    rows = [norms(scale) for scale in SCALES]
    for row in rows:
        print(f"norm, logits x {row['logit_scale']:g}: {row['ratio']:.0f} times as fast as dense")
    runs = [solve(rho, token_dim, exact) for rho in PROFILES for token_dim in TOKEN_DIMS for exact in (True, False)]
    for run in runs:
        spend = "all" if run["exact_spend"] else "at most"
        print(f"D = {DIM}, {LAGS} lags, {run['rho']}, d = {run['token_dim']}, {spend}: {run['seconds']:.3f} s")
    result = {
        "benchmark": f"softmax Jacobian norm at L = {LENGTH}; exact allocation at D = {DIM}, {LAGS} lags",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__},
        "promised": {"ratio": PROMISED_RATIO, "seconds": PROMISED_SECONDS},
        "jacobian_norm": rows,
        "allocation": runs,
    }
    write_atomically(RESULT, json.dumps(result, indent=1) + "\n")
    if any(row["ratio"] < PROMISED_RATIO for row in rows) or any(run["seconds"] > PROMISED_SECONDS for run in runs):
        raise SystemExit(
            f"slower than promised: {PROMISED_RATIO:g} times dense, {PROMISED_SECONDS:g} s per allocation."
        )


if __name__ == "__main__":
    main()
