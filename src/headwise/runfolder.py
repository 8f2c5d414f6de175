"""One run, one folder: its settings, where each stage's result lies, and everything together as a dossier. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from headwise import frontier, strategies
from headwise.errors import HeadwiseError, OutputError
from headwise.heal._options import Options
from headwise.registry import names
from headwise.types import (
    DEFAULT_UNITS,
    VERSION,
    Budget,
    Dossier,
    LatencyTable,
    ModelShape,
    Plan,
    Readings,
    Record,
    Verdict,
    Workload,
    write_atomically,
)

LONGEST_CONTEXT = 32_768  # unless a longer one is asked for
POOLING = ("exact", "uniform", "depth")  # strategies that know rows which heads share


@dataclass(frozen=True, slots=True)
class Settings(Record):
    """What a run was asked to do. A run that was killed goes on under the same settings (see `goes_on`)."""

    model: str
    budgets: tuple[str, ...] = ()
    data: str | None = None  # None: the standard library for the embedded model, the model's own text for others
    eval: str | None = None  # None: held out from `data`
    task: str | None = None  # None: that of the model's head
    strategy: str = "exact"
    rounds: int = 1
    heal: str = "refit"
    heal_options: tuple[str, ...] = ()  # such as steps=200
    portable: bool = False
    allow: tuple[str, ...] = DEFAULT_UNITS
    seed: int = 0
    device: str = "auto"
    tokens: int = 65_536  # calibration
    eval_tokens: int = 32_768
    swap_tokens: int = 4_096  # 0: prices are predicted, not measured
    length: int = 512  # of a block of text, at most what the model takes
    context: int | None = None  # tokens that will be served; None: what the model takes, at most LONGEST_CONTEXT
    trust_remote_code: bool = False
    recompute: bool | None = None  # layers compute twice what gradients need of them; None: where memory asks for it
    stream: bool | None = None  # one layer in memory at a time; None: where the model would not fit
    pool: str = "none"  # key/value heads that share a cached row: a number or all

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("tokens", 1), ("eval_tokens", 1), ("length", 8), ("swap_tokens", 0)):
            if getattr(self, name) < least:
                raise HeadwiseError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.context is not None and self.context < 8:
            raise HeadwiseError(f"context is {self.context}; it is the number of tokens served, at least 8.")
        if self.heal not in (known := ("none", *names("headwise.heal"))):
            raise HeadwiseError(f"no healing is called '{self.heal}'. Known: {', '.join(known)}.")
        Options.parse(self.heal_options)
        if self.pool not in ("none", "all") and not (self.pool.isdecimal() and int(self.pool) > 1):
            raise HeadwiseError(f"pool is '{self.pool}'; give none, all, or how many heads share a row, such as 2.")
        if self.pool != "none":
            self.refuse_to_pool()

    def refuse_to_pool(self) -> None:
        """What heads that share rows cannot have, and what to do instead."""
        if {"heads", "kv_heads"} & set(self.allow):
            raise HeadwiseError("pooled heads cannot go one by one; leave heads and kv_heads out of --allow.")
        if self.portable:
            raise HeadwiseError("stock code has no rows that heads share; leave out --portable or --pool.")
        if self.strategy not in POOLING:
            raise HeadwiseError(f"pooled heads are allocated by {', '.join(POOLING)}; leave out --pool for others.")
        if any(text.strip().startswith("latency") for text in self.budgets):
            raise HeadwiseError("pooled layers are not timed yet; limit kv, params or flops, or leave out --pool.")

    def goes_on(self, before: Settings) -> bool:
        """Whether a run with these settings can go on with what one left behind: only its memory may differ."""
        ours, theirs = (Options.parse(settings.heal_options).fixed() for settings in (self, before))
        return ours == theirs and replace(self, heal_options=()) == replace(before, heal_options=())

    def served(self, longest: int) -> int:
        """Tokens of context that the result must hold for; `longest` is what the model takes."""
        if self.context is not None and self.context > longest:
            raise HeadwiseError(
                f"the context is {self.context:,} tokens and the model takes {longest:,}; lower --context."
            )
        return self.context or min(longest, LONGEST_CONTEXT)

    @property
    def only_kv(self) -> bool:
        """Whether nothing but the cache is limited, so that the MLP need not be looked at."""
        return bool(self.budgets) and all(text.strip().startswith("kv") for text in self.budgets)


class RunFolder:
    """Paths of a run folder and what can be said about it without torch."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.settings_file = self.path / "run.json"
        self.readings_file = self.path / "readings.json"
        self.moments_file = self.path / "moments.safetensors"
        self.streaming = self.path / "streaming"  # moments by layer and unfinished work of a streamed run
        self.plan_file = self.path / "plan.json"
        self.heal_file = self.path / "heal.json"
        self.healing = self.path / "healing"  # unfinished work, gone with the model saved
        self.model = self.path / "model"
        self.proof_file = self.path / "proof.safetensors"
        self.verdict_file = self.path / "verdict.json"
        self.frontier_file = self.path / "frontier.json"
        self.report_file = self.path / "report.html"
        self.card_file = self.path / "report.md"

    def round(self, number: int) -> RunFolder:
        """The folder of a later round; the first round is the run folder itself."""
        return self if number == 1 else RunFolder(self.path / "rounds" / str(number))

    def claim(self, settings: Settings, source: str, overwrite: bool = False) -> None:
        """Take the folder for a run: a new one, or one that the same run left unfinished."""
        if Path(source).is_dir() and self.path.resolve().is_relative_to(Path(source).resolve()):
            raise OutputError(
                f"{self.path} lies in the source model's folder, which is never written; choose another --out."
            )
        if overwrite and self.settings_file.exists():
            shutil.rmtree(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path} is a file; choose another --out.")
        if self.path.exists() and any(self.path.iterdir()):
            if not self.settings_file.exists():
                raise OutputError(f"{self.path} is not empty and holds no run of headwise; choose another --out.")
            if self.report_file.exists():
                raise OutputError(f"{self.path} holds a finished run; choose another --out or add --overwrite.")
            if not settings.goes_on(Settings.read(self.settings_file)):
                raise OutputError(
                    f"{self.path} holds an unfinished run with other settings; run it with the same ones, "
                    "choose another --out or add --overwrite."
                )
        try:
            settings.save(self.settings_file)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written ({error.strerror}); choose another --out.") from None

    def require(self) -> Settings:
        """The settings of an existing run."""
        if not self.settings_file.exists():
            raise OutputError(
                f"{self.path} holds no run of headwise; begin with: headwise probe MODEL --out {self.path}"
            )
        return Settings.read(self.settings_file)

    def table_file(self, work: Workload) -> Path:
        """Where the measured times of a workload lie."""
        return self.path / f"latency-{work.phase}-{work.length}-b{work.batch}.json"

    def table(self, work: Workload) -> LatencyTable | None:
        """The measured times of a workload, if they are here."""
        path = self.table_file(work)
        return LatencyTable.read(path) if path.exists() else None

    def tables(self) -> tuple[LatencyTable, ...]:
        """All measured times."""
        return tuple(LatencyTable.read(path) for path in sorted(self.path.glob("latency-*.json")))

    def read_plan(self) -> Plan:
        """The plan, with the tables that price it."""
        plan = Plan.read(self.plan_file)
        if all(budget.workload is None for budget in plan.budgets):
            return plan
        known = {(table.workload, table.device): table for table in self.tables()}
        attached = (replace(b, table=known.get((b.workload, b.device))) if b.workload else b for b in plan.budgets)
        return replace(plan, budgets=tuple(attached))

    def write_plan(self, plan: Plan) -> None:
        """Write the plan; an older one is kept beside it."""
        if self.plan_file.exists() and Plan.read(self.plan_file) != plan:
            shutil.copyfile(self.plan_file, self.path / "plan.previous.json")
        plan.save(self.plan_file)

    def write_json(self, path: Path, data: dict[str, Any], indent: int | None = 1) -> None:
        """Write a plain dictionary atomically."""
        write_atomically(path, json.dumps(data, indent=indent) + "\n")

    def dossier(self) -> Dossier:
        """Everything in the folder; stages that have not run are None."""
        settings = self.require()
        readings = Readings.read(self.readings_file) if self.readings_file.exists() else None
        plan = self.read_plan() if self.plan_file.exists() else None
        healing = json.loads(self.heal_file.read_text()) if self.heal_file.exists() else None
        verdict = Verdict.read(self.verdict_file) if self.verdict_file.exists() else None
        rivals = _baselines(readings, plan, settings) if readings and plan else ()
        sweep = None
        if readings and plan:
            sweep = frontier.stored(self.frontier_file, frontier.fingerprint(readings, plan, settings.allow))
        described = {**settings.to_json(), "versions": _versions()}
        return Dossier(described, readings, plan, healing, verdict, rivals, sweep)


def _baselines(readings: Readings, plan: Plan, settings: Settings) -> tuple[dict[str, Any], ...]:
    """What other strategies would have predicted for the same budgets, where the same probe priced them."""
    found: list[dict[str, Any]] = []
    names = ["exact", "uniform", "taper"]
    names += ["published"] if "qk_pairs" in strategies.ways(readings) else []
    names += ["depth"] if "depth" in settings.allow and readings.curve("damage.depth") else []
    pooled = any(layer.pooled > 1 for layer in plan.source.layers)
    for name in names:
        if (name == plan.strategy and not plan.portable) or (pooled and name not in POOLING):
            continue
        try:
            other = strategies.allocate(readings, plan.budgets, name, settings.allow, seed=plan.seed)
        except HeadwiseError:
            continue
        found.append({"strategy": name, "predicted_damage": other.predicted_damage, "spent": other.spent})
    return tuple(found)


def budgets_for(settings: Settings, shape: ModelShape, tables: Sequence[LatencyTable] = ()) -> tuple[Budget, ...]:
    """The settings' budgets, read against the source's shape."""
    from headwise.budgets import parse_all

    return parse_all(settings.budgets, shape, tables)


def write_report(folder: RunFolder) -> Dossier:
    """Write report.html and report.md from whatever the folder holds; the frontier is solved where it is not there."""
    from headwise.report import model_card, render

    dossier = _with_sweep(folder, folder.dossier())
    write_atomically(folder.card_file, model_card(dossier))
    write_atomically(folder.report_file, render(dossier))
    return dossier


def write_comparison(folders: Sequence[Path], out: Path, overwrite: bool = False) -> None:
    """Write one page that compares several runs."""
    from headwise.report import compare

    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists already; choose another --out or add --overwrite.")
    if len({path.resolve() for path in folders}) < len(folders):
        raise HeadwiseError("a run folder was given twice; name every run once.")
    names = [path.name for path in folders]
    unique = [path.name if names.count(path.name) == 1 else str(path) for path in folders]
    dossiers = [(name, RunFolder(path).dossier()) for name, path in zip(unique, folders, strict=True)]
    try:
        write_atomically(out, compare(dossiers))
    except OSError as error:
        raise OutputError(f"{out} cannot be written ({error.strerror}); choose another --out.") from None


def _with_sweep(folder: RunFolder, dossier: Dossier) -> Dossier:
    """The dossier with its frontier: as stored, or solved and stored."""
    readings, plan, known = dossier.readings, dossier.plan, dossier.sweep
    if readings is None or plan is None or (known is not None and frontier.complete(known, plan)):
        return dossier
    try:
        found = frontier.solve(readings, plan, folder.require().allow, known)
    except HeadwiseError:  # readings of an older version that price too little: the page does without
        return dossier
    if found is not None:
        folder.write_json(folder.frontier_file, {"headwise": "Sweep", "version": VERSION, **found.to_json()}, None)
    return replace(dossier, sweep=found)


def _versions() -> dict[str, str]:
    out = {}
    for package in ("headwise", "torch", "transformers", "scipy"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out
