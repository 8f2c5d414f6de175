"""Time and memory of whole runs, from probe to report, by the size of the model. Needs a CUDA device.

    python benchmarks/scale.py --shape 8b --work /large/disk --out benchmarks/results/scale.json
    python benchmarks/scale.py --shape 8b --limit 24 --work /large/disk --out benchmarks/results/scale.json
    python benchmarks/scale.py --model embedded --out benchmarks/results/scale.json
    python benchmarks/scale.py --demo   # seconds of `headwise demo` on this machine, five times
    python benchmarks/scale.py --page   # rewrite the table of docs/SCALE.md from the committed results

A shape is a checkpoint of random bf16 weights, made shard by shard: what is measured is time and memory, not quality.
Every run has the settings of a command without options but those that its row names, and a process of its own. Seconds
and peaks are by stage: allocated memory of the device as torch counts it, resident memory of the host. `--limit` lets
torch have so many GiB of the device. A row also has what the run estimated before it began, and what it certified.
How time grows with the size is measured by `benchmarks/growth.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import growth
import same_plan
from join import SHARED
from provenance import commit
from streaming import make

ROOT = Path(__file__).parents[1]
PAGE, RESULT = ROOT / "docs" / "SCALE.md", ROOT / "benchmarks" / "results" / "scale.json"
START, END = "<!-- scale: printed by benchmarks/scale.py --page -->", "<!-- end of scale -->"
GIB = 1 << 30
ABOUT_MEMORY = """Estimated before a run began, from its settings and the model's configuration; used: the most that
torch had allocated in the stage, and resident memory of the host, where pages of mapped files count. Verifying also
starts a process of its own that loads the new model; it is in the printed estimate and left out here. A healing that
does harm is not kept: its copy of the layers is then not there when the model is saved."""
MOVING = ("loading the model", "saving the model", "loading the new model", "reloading in a fresh process")
CHANGED = {  # commit of a row -> what changed since; gone from the page when the row is measured again
    "75ab3d510992": "Measured beside other work, before fewer steps were timed and before attention by cuDNN was left "
    "out.",
    "077bd1cca3a1": "Measured before attention by cuDNN was left out, which plans for every new length, before noise "
    "was made on the device, and before the reload check imported in advance. The estimate for prices of streamed "
    "models was too low and has been raised since.",
}
LLAMA = dict(vocab_size=128_256, max_position_embeddings=8_192, rope_theta=500_000.0, tie_word_embeddings=False)
SHAPES: dict[str, dict[str, Any]] = {
    "28m": dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4,
                num_hidden_layers=8) | LLAMA | {"vocab_size": 4_096, "max_position_embeddings": 1_024},
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_attention_heads=32, num_key_value_heads=4,
               num_hidden_layers=22) | LLAMA | {"vocab_size": 32_000},
    "8b": dict(hidden_size=4096, intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8,
               num_hidden_layers=32) | LLAMA,
    "70b": dict(hidden_size=8192, intermediate_size=28_672, num_attention_heads=64, num_key_value_heads=8,
                num_hidden_layers=80) | LLAMA,
}  # fmt: skip


class Stages:
    """Progress of a run, as seconds and peaks of every stage."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def __call__(self, items: Sequence[Any], label: Any) -> Iterable[Any]:
        import torch

        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield from items
        name = label if isinstance(label, str) else label()
        seconds = time.perf_counter() - start
        self.found.append({"stage": name, "from": start - self.began, "seconds": seconds, **peaks()})
        print(f"{start - self.began:7.1f} s: {name}, {seconds:.1f} s", file=sys.stderr, flush=True)


def peaks() -> dict[str, float]:
    """GiB of the device since the last stage began, and of the host since the start."""
    import torch

    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"device_gib": torch.cuda.max_memory_allocated() / GIB, "host_gib": host / GIB}


def allow(limit: float | None) -> None:
    """Let torch have so many GiB of the device; all of it where no limit is given."""
    import torch

    if limit:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit * GIB / whole)


def run(model: str, out: str, settings: dict[str, Any], limit: float | None) -> dict[str, Any]:
    """One run in this process."""
    import torch

    from headwise import pipeline
    from headwise.checks import speed
    from headwise.runs.folder import RunFolder
    from headwise.runs.settings import Settings
    from headwise.stream.source import is_streamed

    allow(limit)
    asked = Settings(model, **settings)
    expected = pipeline.memory_needed(asked, asked.stream or is_streamed(asked, RunFolder(out), warn=False))
    stages, start = Stages(), time.perf_counter()
    dossier = pipeline.run(asked, out, stages)
    found = {"seconds": time.perf_counter() - start, "stages": stages.found}
    found |= {name: max(stage[name] for stage in stages.found) for name in ("device_gib", "host_gib")}
    verdict = dossier.verdict.to_json() if dossier.verdict else {"checks": []}
    return found | {
        "estimated": [stage._asdict() for stage in expected],
        "checks": {check["name"]: check["passed"] for check in verdict["checks"]},
        **{name: verdict[name] for name in ("quality", "damage", "samples") if name in verdict},
        "hardware": speed.machine(torch.device("cuda")),
    }


def in_child(model: str, name: str, out: Path, settings: dict[str, Any], limit: float | None) -> dict[str, Any]:
    """`run` in a process of its own."""
    told = json.dumps([model, str(out), settings, limit])
    code = "import json, scale, sys; print('RESULT' + json.dumps(scale.run(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, told]
    start, errors = time.perf_counter(), out.parent / "errors.txt"
    out.parent.mkdir(parents=True, exist_ok=True)
    with errors.open("w") as file:
        done = subprocess.run(command, stdout=-1, stderr=file, text=True, check=False, cwd=Path(__file__).parent)
    told = errors.read_text().strip()
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    about = {"name": name, "settings": settings, "limit_gib": limit, "process_seconds": time.perf_counter() - start}
    about |= {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit()}
    if not lines:
        return about | {"why": told.splitlines()[-1][:300] if told else "no output"}
    return about | json.loads(lines[0][6:])


def demo(times: int = 5) -> dict[str, Any]:
    """Seconds of `headwise demo`, each in a process and a folder of its own."""
    from provenance import hardware

    found = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "headwise", "demo"], cwd=folder, stdout=-3, stderr=-3, check=True)
            found.append(time.perf_counter() - start)
    when = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit()}
    return {"seconds": found, **hardware(), **when}


def of_demo(found: dict[str, Any]) -> str:
    """What the page says about it."""
    low, middle, high = (f"{pick(found['seconds']):.0f}" for pick in (min, statistics.median, max))
    return (
        f"`make demo`, once installed: {middle} s ({low} to {high}, {len(found['seconds'])} times) on "
        f"{found['cores']} cores of {found['processor']}, without a GPU; {found['date']}, commit {found['commit']}."
    )


def table(results: dict[str, Any]) -> str:
    """The page's table, and under it the stages of every run."""
    if not results["rows"]:
        return "No results yet: see benchmarks/scale.py."
    names = ("run", "seconds", "without reading and writing weights", "GiB on the device", "GiB on the host", "checks")
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for row in results["rows"]:
        if "why" in row:
            lines.append(f"| {row['name']} | not finished: {row['why']} | | | | |")
            continue
        passed = f"{sum(row['checks'].values())} of {len(row['checks'])} passed"
        moved = sum(stage["seconds"] for stage in row["stages"] if stage["stage"] in MOVING)
        seconds = f"{row['seconds']:.0f} | {row['seconds'] - moved:.0f}"
        lines.append(f"| {row['name']} | {seconds} | {row['device_gib']:.1f} | {row['host_gib']:.1f} | {passed} |")
    for row in results["rows"]:
        if "why" in row:
            continue
        long = [stage for stage in row["stages"] if stage["seconds"] >= 1]
        told = [f"{s['stage']} {s['seconds']:.0f} s ({s['device_gib']:.0f} GiB)" for s in long]
        lines += [
            "",
            f"- **{row['name']}**: {', '.join(told)}. {row['hardware']}, {row['date']}, commit {row['commit']}. "
            f"{CHANGED.get(row['commit'], '')}".rstrip(),
        ]
    lines += of_layers(results["rows"]) + of_texts(results["rows"])
    lines += ["", of_demo(results["demo"])] if "demo" in results else []
    return "\n".join([*lines, *of_memory(results["rows"]), *growth.section(), *same_plan.section()])


def of_texts(rows: list[dict[str, Any]]) -> list[str]:
    """What the page says about quality, and about what models write: of real models, whose data is named."""
    told: list[str] = []
    for row in (row for row in rows if "eval" in row["settings"] and "quality" in row):
        found, about = row["quality"], row["settings"]
        low, after, high = (f"{found[f'perplexity_after{end}']:.2f}" for end in ("_low", "", "_high"))
        said = f"perplexity {found['perplexity_before']:.2f} before, {after} after ({low} to {high}, 95%)"
        said += f", KL to the source {found['kl']:.4f}, same next token {found['next_token_agreement']:.1%}"
        told += ["", f"**{row['name']}**, on {about['eval']}, calibrated on {about['data']}: {said}.", ""]
        told += ["| prompt | the source continues | the cut model continues |", "| --- |" + " --- |" * 2]
        for sample in row["samples"]:
            told.append(f"| {' | '.join(_plain(sample[name]) for name in ('prompt', 'before', 'after'))} |")
    return told


def _plain(text: str) -> str:
    """A text on one line, its marks as they are."""
    return f"`{' '.join(text.split())[:160].replace('`', chr(39)).replace('|', '/')}`"


def of_memory(rows: list[dict[str, Any]]) -> list[str]:
    """What the page says about memory: estimated before a run began, and used; of rows that have today's estimates."""
    rows = [row for row in rows if "estimated" in row and all("beside" in stage for stage in row["estimated"])]
    if not rows:
        return []
    names = ("run", "stage", "GiB on the device, estimated", "used", "used by estimated", "on the host")
    told = ["", "## Memory, estimated and used", "", ABOUT_MEMORY, ""]
    told += [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for row in rows:
        for stage in row["estimated"]:
            own = (stage["device"] - stage["beside"]) / GIB
            used = max(
                (s["device_gib"] for s in row["stages"] if estimated_as(s["stage"]) == stage["stage"]), default=0
            )
            if used:
                ratio = f"{own:.1f} | {used:.1f} | {used / own:.2f}"
                told.append(f"| {row['name']} | {stage['stage']} | {ratio} | |")
        host = max(stage["host"] for stage in row["estimated"]) / GIB
        ratio = f"{host:.1f} estimated, {row['host_gib']:.1f} used: {row['host_gib'] / host:.2f}"
        told.append(f"| {row['name']} | whole run | | | | {ratio} |")
    return told


def estimated_as(label: str) -> str:
    """The name of a stage among the estimates."""
    known = {"damage of bits": "prices", "second moments": "prices", "sensitivity": "prices", "gains": "prices"}
    known |= {"layers, one at a time": "prices", "measured damage": "single cuts", "loading the model": "loading"}
    known |= {"text by the model": "text by the model", "saving the model": "saving"}
    known |= {name: f"healing by {name}" for name in ("refit", "blockwise", "distill")}
    later = ("loading the new", "quality", "retrieval", "answers", "writing", "reloading", "timing both")
    return "verifying" if label.startswith(later) else known.get(label, "")


def of_layers(rows: list[dict[str, Any]]) -> list[str]:
    """What the page says about shapes of which only some layers were there."""
    told, shapes = [], dict[str, list[tuple[int, dict[str, Any]]]]()
    for row in rows:
        if (match := re.match(r"(.+), (\d+) of (\d+) layers", row["name"])) and "why" not in row:
            shapes.setdefault(f"{match[1]}|{match[3]}", []).append((int(match[2]), row))
    for name, found in shapes.items():
        if len(found) < 2:
            continue
        (few, short), *_, (many, long) = sorted(found, key=lambda pair: pair[0])
        (shape, whole), each = name.split("|"), (long["seconds"] - short["seconds"]) / (many - few)
        all_of_it = short["seconds"] + (int(whole) - few) * each
        told += [
            "",
            f"{shape}: {each:.1f} s for every layer from {few} to {many} of them. Extrapolated to all {whole}: "
            f"{all_of_it / 60:.0f} minutes, with {long['device_gib']:.0f} GiB on the device "
            f"({short['device_gib']:.0f} GiB with {few} layers).",
        ]
    return told


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its table as the results say."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}"


def measure(asked: argparse.Namespace) -> None:
    """One run; its row replaces that of the same name."""
    name, model = asked.name or f"{asked.shape or Path(asked.model).stem}, {asked.budget}", asked.model
    if asked.shape:
        shape = SHAPES[asked.shape] | ({"num_hidden_layers": asked.layers} if asked.layers else {})
        folder = asked.work / f"{asked.shape}-{shape['num_hidden_layers']}"
        if not folder.exists():
            make(folder, shape["num_hidden_layers"], shape)
        model = str(folder.resolve())
    settings = {"budgets": (asked.budget,), "device": "cuda"}
    settings |= {key: value for key in ("heal", "data", "eval", "stream") if (value := getattr(asked, key))}
    out = asked.work.resolve() / "run"
    shutil.rmtree(out, ignore_errors=True)
    row = in_child(model, name, out, settings, asked.limit)
    row["settings"] |= {key: Path(settings[key]).name for key in ("data", "eval") if key in settings}
    if asked.shared and "hardware" in row:
        row["hardware"] += SHARED
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
    found["rows"] = [*(other for other in found["rows"] if other["name"] != name), row]
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.keep and out.exists():
        shutil.copytree(out, asked.keep, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)


def join(others: Sequence[Path], out: Path) -> None:
    """Take rows that were measured elsewhere; each replaces that of the same name."""
    found = json.loads(out.read_text()) if out.exists() else {"rows": []}
    for other in others:
        new = json.loads(other.read_text())["rows"]
        names = [row["name"] for row in new]
        found["rows"] = [*(row for row in found["rows"] if row["name"] not in names), *new]
    out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Measure one run, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES)
    what.add_argument("--model")
    what.add_argument("--demo", action="store_true")
    what.add_argument("--page", action="store_true")
    what.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="take the rows of other results")
    parser.add_argument("--name", help="of the row")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--budget", default="kv=50%")
    parser.add_argument("--heal")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--keep", type=Path, help="folder for all of the run but its weights")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--shared", action="store_true", help="note that the machine has other work meanwhile")
    parser.add_argument("--limit", type=float, help="GiB of the device")
    parser.add_argument("--work", type=Path, default=Path("scale-work"), help="folder for checkpoints and runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    if asked.page:
        results = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
        PAGE.write_text(filled(PAGE.read_text(), results))
    elif asked.join:
        join(asked.join, asked.out)
    elif asked.demo:
        found = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": []}
        asked.out.write_text(json.dumps(found | {"demo": demo()}, indent=1) + "\n")
    else:
        measure(asked)


if __name__ == "__main__":
    main()
