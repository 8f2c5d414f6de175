"""Is the plan the same on a CPU, on a GPU, and in two processes? The same seed, text and settings, each in its own run.

    python benchmarks/texts.py DATA texts   # writes mix.txt and code.txt
    python benchmarks/same_plan.py --case embedded texts/code.txt --case MODEL texts/mix.txt --budget kv=50%
    python benchmarks/same_plan.py --perturb 1e-6 ...   # where there is no GPU: other rounding in place of one

Every run is `headwise probe` by itself, followed by the allocation. Every plan is compared with that of one process on
the CPU. Two plans tie if each costs at most 1% more than the best plan by the prices of the other's probing, and if the
difference of their damages on the same held-out rows, all on one device, is within its 95% interval. A code that a
probing did not offer is priced as the others are: by the prices of its coefficients, times measured over predicted
damage at its bytes. `--perturb` multiplies all weights by one plus so much noise: that is what a GPU's rounding does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from provenance import commit, hardware

WAYS = {  # name -> device, processes, and whether weights are perturbed
    "CPU": ("cpu", 1, False),
    "CPU, two processes": ("cpu", 2, False),
    "CPU, weights perturbed": ("cpu", 1, True),
    "GPU": ("cuda", 1, False),
    "GPU again": ("cuda", 1, False),
}
FIRST, TWINS = "CPU", ("GPU", "GPU again")
TIE = 0.01  # of the best plan's cost, at most
ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "same-plan.json"
ABOUT = f"""The same random seed, text and settings; every row is a probing and an allocation of its own, compared with
the plan of one process on the CPU. Extra cost: of the row's plan by the prices that the CPU found, and of the CPU's
plan by the prices that the row found, each over the best plan there. Difference: of the damages on the same held-out
rows, in nats per token, with half of its 95% interval. A row ties where its plan is another one than the CPU's, both
extra costs are at most {TIE:.0%}, and the difference is within its interval. Perturbed: every weight was multiplied by
one plus a small random number, which stands for the rounding of another device."""


def start(way: str, folder: Path, model: str, text: str, budget: str, asked: argparse.Namespace) -> Any:
    """A probing of its own."""
    device, count, perturbed = WAYS[way]
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    run = [__file__, "--noise", str(asked.perturb)] if perturbed else ["-m", "headwise"]
    command = [sys.executable, *(many if count > 1 else []), *run, "probe", model, "--budget", budget, "--data", text]
    command += ["--device", device, "--tokens", str(asked.tokens), "--swap-tokens", str(asked.swap_tokens)]
    log = folder.with_suffix(".log").open("w")
    told = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "3")}
    return subprocess.Popen([*command, "--out", str(folder)], stdout=log, stderr=subprocess.STDOUT, env=told)


def perturbed(noise: float, words: list[str]) -> None:
    """The command `headwise` with these words, for a model whose weights are off by so much, relatively."""
    import torch

    from headwise import families
    from headwise.cli.commands import main as headwise

    load = families.load

    def loaded(*args: Any, **named: Any) -> Any:
        model, tokenizer = load(*args, **named)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=draw))
        return model, tokenizer

    families.load = loaded
    sys.argv = ["headwise", *words]
    headwise()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number in nested lists and dictionaries, with its place."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{name}.{key}")
    else:
        yield name, value


def differing(one: Any, other: Any) -> tuple[int, int]:
    """How many sizes of the layers differ, and how many there are."""
    ours, theirs = (dict(leaves([layer.to_json() for layer in plan.target.layers])) for plan in (one, other))
    places = ours.keys() | theirs.keys()
    return sum(ours.get(place) != theirs.get(place) for place in places), len(places)


def cost(plan: Any, probed: Any) -> float:
    """The damage of a plan by the prices of another probing."""
    return sum(
        _code_cost(getattr(target, f"{name}_code"), probed, layer, name)
        for layer, target in enumerate(plan.target.layers)
        for name in "kv"
    )


def _code_cost(code: tuple[int, ...], probed: Any, layer: int, name: str) -> float:
    """Of one layer's keys or values: predicted, times measured over predicted at its bytes, between known sizes."""
    from headwise.probes.fisher import Costs
    from headwise.types import code_bytes

    kind = f"damage.{name}_bits"
    predicted = next(curve for curve in probed.readings.curves if curve.kind == kind)
    believed, costs = probed.readings.curve(kind), Costs.of(probed.moments[layer], name)
    pairs = zip(predicted.values[layer], believed.values[layer], strict=True)
    ratios = [math.log(max(after, 1e-12) / max(before, 1e-12)) for before, after in pairs][1:]
    size = code_bytes(code, len(costs.prices))
    ratio = np.interp(size, predicted.ticks[layer][:0:-1], ratios[::-1])
    return costs.damage(code) * math.exp(float(ratio))


def compared(plans: dict[str, Any], probed: dict[str, Any], settings: Any) -> dict[str, Any]:
    """Both models' losses with every plan, cut by its own probing's moments, on one device and the same rows."""
    from headwise import pipeline
    from headwise.checks import quality
    from headwise.progress import silently

    source, found = pipeline.load_source(settings), {}
    for way, plan in plans.items():
        fitted = source.fit(settings, probed[way], plan, None, silently)
        found[way] = quality.compare(source.family, source.model, fitted.model, source.evaluation)
    return found


def all_ways(
    model: str, text: str, budget: str, asked: argparse.Namespace, work: Path
) -> tuple[dict[str, Path], list[Any]]:
    """The folders of all ways, side by side, and rows for those that did not end well."""
    import torch

    possible = {"cpu": True, "cuda": torch.cuda.is_available()}
    wanted = [way for way, (device, _, noisy) in WAYS.items() if possible[device] and (asked.perturb or not noisy)]
    folders = {way: work / f"{Path(model).name}-{number}" for number, way in enumerate(wanted)}
    running = {way: start(way, folder, model, text, budget, asked) for way, folder in folders.items()}
    failed = [way for way in wanted if running[way].wait() != 0]
    told = {way: folders[way].with_suffix(".log").read_text().strip().splitlines() or ["no output"] for way in failed}
    rows = [{"way": way, "why": lines[-1][:300]} for way, lines in told.items()]
    return {way: folder for way, folder in folders.items() if way not in failed}, rows


def case(model: str, text: str, budgets: list[str], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All ways for one model: a comparison for every budget."""
    import torch

    from headwise.budgets import parse_all
    from headwise.runs.folder import RunFolder
    from headwise.runs.moments import read_moments
    from headwise.runs.settings import Settings
    from headwise.stages.allocate import plan_for
    from headwise.stages.source import Probed
    from headwise.types import Readings

    about = {"model": Path(model).name, "text": Path(text).name}
    about |= {"tokens": asked.tokens, "swap_tokens": asked.swap_tokens, "perturbed": asked.perturb}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as work:
        folders, failed = all_ways(model, text, budgets[0], asked, Path(work))
        probed = {}
        for way, path in folders.items():
            readings = Readings.read(RunFolder(path).readings_file)
            moments = read_moments(RunFolder(path).moments_file, device, readings.source.layers)
            probed[way] = Probed(readings, moments)
        for budget in budgets:
            settings = Settings(model, (budget,), data=text, device=str(device), tokens=asked.tokens, heal="none")
            limits = {way: parse_all((budget,), found.readings.source) for way, found in probed.items()}
            plans = {way: plan_for(settings, found.readings, limits[way]) for way, found in probed.items()}
            damage = compared(plans, probed, settings)
            rows = [_row(way, plans, probed, damage) for way in plans if FIRST in plans]
            yield {**about, "budget": budget, "rows": [*rows, *failed]}


def _row(way: str, plans: dict[str, Any], probed: dict[str, Any], damage: dict[str, Any]) -> dict[str, Any]:
    """One plan beside the CPU's."""
    from headwise.checks.quality import interval

    apart, count = differing(plans[way], plans[FIRST])
    extra = {
        "extra": cost(plans[way], probed[FIRST]) / cost(plans[FIRST], probed[FIRST]) - 1,
        "extra_of_first": cost(plans[FIRST], probed[way]) / cost(plans[way], probed[way]) - 1,
    }
    more = damage[way].loss_after - damage[FIRST].loss_after
    low, high = interval(more, 0)
    moved = {"difference": float(more.mean()), "difference_low": low, "difference_high": high}
    twin = {"differing_from_twin": differing(plans[way], plans[TWINS[0]])[0]} if way == TWINS[1] else {}
    return {"way": way, "differing": apart, "sizes": count, **extra, **moved, **twin, **damage[way].damage()}


def ties(row: dict[str, Any]) -> bool:
    """Whether a plan is as good as the CPU's, as far as the two probings and the held-out text can tell."""
    alike = max(row["extra"], row["extra_of_first"]) <= TIE
    return alike and row["difference_low"] <= 0 <= row["difference_high"]


def section(file: Path = RESULT) -> list[str]:
    """What the page says of it, once it was measured."""
    if not file.exists():
        return []
    results = json.loads(file.read_text())
    if not all("extra" in row or "why" in row for _, row in _rows(results)):
        return []  # of a version that did not say what a tie is
    lines = ["", "## The same plan on a CPU and on a GPU", ""]
    lines += [ABOUT, ""]
    lines += ["| model, budget | computed on | sizes that differ | extra cost | difference | damage | verdict |"]
    lines += ["| --- |" + " --- |" * 6]
    lines += [_line(found, row) for found, row in _rows(results)]
    sizes = "; ".join(dict.fromkeys(f"{c['model']}: {c['tokens']:,} tokens of {c['text']}" for c in results["cases"]))
    where = f"{results['gpu']}; {results['cores']} cores of {results['processor']}"
    off = {found["perturbed"] for found in results["cases"] if found.get("perturbed")}
    sizes += "".join(f"; perturbed by {noise:g}" for noise in sorted(off))
    note = f"{sizes}. Damage before healing, on held-out text, all plans on one device; 95% intervals over rows."
    twins = {
        f"{c['model']}, {c['budget']}": r["differing_from_twin"]
        for c, r in _rows(results)
        if "differing_from_twin" in r
    }
    told = [f"Sizes in which the two runs on the GPU differ: {', '.join(f'{n} ({k})' for k, n in twins.items())}."]
    return [
        *lines,
        *(["", *told] if twins else []),
        "",
        f"{note} {where}, {results['date']}, commit {results['commit']}.",
    ]


def _rows(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return ((found, row) for found in results["cases"] for row in found["rows"])


def _line(found: dict[str, Any], row: dict[str, Any]) -> str:
    name = f"| {found['model']}, {found['budget']} | {row['way']} |"
    if "why" in row:
        return f"{name} not finished: {row['why']} | | | | |"
    verdict = "the same plan" if not row["differing"] else "ties" if ties(row) else "another plan"
    half, off = (row[f"{of}_high"] - row[f"{of}_low"] for of in ("measured", "difference"))
    extra = f"{row['extra']:+.2%}, {row['extra_of_first']:+.2%}"
    cells = f"{row['differing']} of {row['sizes']} | {extra} | {row['difference']:+.5f} ± {off / 2:.5f}"
    return f"{name} {cells} | {row['measured']:.5f} ± {half / 2:.5f} | {verdict} |"


def main() -> None:
    """Measure every case; write after each."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", nargs=2, action="append", required=True, metavar=("MODEL", "TEXT"))
    parser.add_argument("--budget", action="append")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--swap-tokens", type=int, default=2_048)
    parser.add_argument("--perturb", type=float, default=0.0, help="add a row with weights off by so much, relatively")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    found: dict[str, Any] = {"cases": [], **hardware(), "commit": commit()}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    for model, text in asked.case:
        for row in case(model, text, asked.budget or ["kv=50%"], asked):
            found["cases"].append(row)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--noise"]:
        perturbed(float(sys.argv[2]), sys.argv[3:])
    else:
        main()
