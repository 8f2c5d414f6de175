"""One run, one folder: its settings, where each stage's result lies, and everything together as a dossier. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from headwise import frontier, strategies
from headwise.errors import (
    BudgetError,
    DataError,
    HeadwiseError,
    ModelError,
    OutputError,
    PlanError,
    ShapeError,
    UnknownNameError,
)
from headwise.files import is_number, read_object, shortened
from headwise.heal._options import Options
from headwise.keeping import aside, disk, fingerprint
from headwise.keeping.finished import Ledger
from headwise.keeping.lock import is_first, locked
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
from headwise.types.verdict import MAX_LOSS, damage_limit

LONGEST_CONTEXT = 32_768  # unless a longer one is asked for
POOLING = ("exact", "uniform", "depth")  # strategies that know rows which heads share
OWN = (
    "run.json", "finished.json", "readings.json", "moments.safetensors", "streaming", "probing", "rounds", "plan.json",
    "plan.previous.json", "heal.json", "healing", "model", "proof.safetensors", "verdict.json", "frontier.json",
    "report.html", "report.md", "latency-*.json",
)  # fmt: skip  # everything that a run writes; whatever else lies in its folder is not touched
WORK = ("streaming", "probing", "rounds", "healing")  # subfolders in which work is kept that a kill would lose
PLANNED = ("budgets", "strategy", "allow", "portable", "seed")  # settings that a plan follows
HEALED = ("heal", "heal_options")  # settings that a healing follows


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
    trust_remote_code: bool = False  # of this command alone: the value in a file is never believed
    recompute: bool | None = None  # layers compute twice what gradients need of them; None: where memory asks for it
    stream: bool | None = None  # one layer in memory at a time; None: where the model would not fit
    pool: str = "none"  # key/value heads that share a cached row: a number or all
    max_loss: str | None = None  # most damage that counts as good: 2% of perplexity, or nats; None: MAX_LOSS

    def __post_init__(self) -> None:
        if lost := [n for n in ("model", "data", "eval", "task", "device") if "\0" in (getattr(self, n) or "")]:
            raise HeadwiseError(f"{lost[0]} contains a NUL character; give a name that a file can have.")
        for name, least in (("rounds", 1), ("tokens", 1), ("eval_tokens", 1), ("length", 8), ("swap_tokens", 0)):
            if getattr(self, name) < least:
                raise HeadwiseError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.context is not None and self.context < 8:
            raise HeadwiseError(f"context is {self.context}; it is the number of tokens served, at least 8.")
        if self.heal not in (known := ("none", *names("headwise.heal"))):
            raise HeadwiseError(f"no healing is called '{self.heal}'. Known: {', '.join(known)}.")
        Options.parse(self.heal_options)
        damage_limit(self.max_loss or MAX_LOSS)
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
        free: dict[str, Any] = {"heal_options": (), "trust_remote_code": False}  # trust is asked for every time
        return ours == theirs and replace(self, **free) == replace(before, **free)

    def served(self, longest: int) -> int:
        """Tokens of context that the result must hold for; `longest` is what the model takes."""
        if self.context is not None and self.context > longest:
            raise HeadwiseError(
                f"the context is {self.context:,} tokens and the model takes {longest:,}; lower --context."
            )
        return self.context or min(longest, LONGEST_CONTEXT)

    def difference(self, before: Settings) -> str:
        """The first setting that keeps a run from being resumed, in words."""
        for name in (field.name for field in fields(self)):
            now, then = getattr(self, name), getattr(before, name)
            if now != then and not (name == "heal_options" and self.goes_on(replace(before, heal_options=now))):
                return f"{name} was {_shown(then)} and is now {_shown(now)}"
        return "the settings differ"

    def asked(self, names: Sequence[str]) -> dict[str, str]:
        """Some settings as text, for the record of what a stage followed."""
        return {name: json.dumps(self.to_json()[name]) for name in names}

    def inputs(self, source: str) -> dict[str, str]:
        """Fingerprints of everything that is read: the model, found at `source`, and the text."""
        data = self.data or ("stdlib" if self.model == "embedded" else None)
        return {
            **fingerprint.of_model(self.model, source),
            **fingerprint.of_data(data),
            **fingerprint.of_data(self.eval),
        }

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
        self.probing = self.path / "probing"  # what an unfinished probing found, gone with the readings written
        self.ledger = Ledger(self.path)

    def round(self, number: int) -> RunFolder:
        """The folder of a later round; the first round is the run folder itself."""
        return self if number == 1 else RunFolder(self.path / "rounds" / str(number))

    @contextmanager
    def held(self, command: str, new: bool = False) -> Iterator[None]:
        """Keep other commands out of the folder; first complete or undo what a kill interrupted in it.

        A folder that does not exist is made for a `new` run only. Errors of the disk end in one line.
        """
        if not new and not self.path.is_dir():
            self.require()
        with disk.explained(self.path), locked(self.path, command) as taken:
            if taken:
                self.recover()
            yield

    def recover(self) -> None:
        """Complete or undo what a kill interrupted."""
        aside.undo_move(self.path)
        disk.recover(self.path, WORK)
        if (self.path / aside.PREVIOUS).exists() and self.is_finished():  # killed before it deleted what it replaced
            aside.drop(self.path)

    def is_ours(self) -> bool:
        """Whether Headwise made a run here; a file of the same name that somebody else wrote is none."""
        return any(_is_record(path) for path in (self.settings_file, self.ledger.file))

    def is_finished(self) -> bool:
        """Whether a run has come to its report, with a verdict."""
        if not self.ledger.complete:
            return self.report_file.exists()
        report = self.ledger.stage("report")
        return report is not None and bool(report.used.get("verdict.json")) and self.report_file.exists()

    def refuse(self, settings: Settings, source: str) -> None:
        """Refuse a folder whose run would write over its own inputs; nothing is touched."""
        if Path(source).is_dir() and self.path.resolve().is_relative_to(Path(source).resolve()):
            raise OutputError(
                f"{self.path} lies in the source model's folder, which is never written; choose another --out."
            )
        if self.path.is_dir():
            aside.refuse_inside(self.path, OWN, (settings.model, source, settings.data, settings.eval))

    def claim(self, settings: Settings, source: str, overwrite: bool = False) -> None:
        """Take the folder for a run: a new one, or one that the same run left unfinished.

        A run that is replaced waits in `.previous` until the new one is finished.
        """
        self.refuse(settings, source)
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path} is a file; choose another --out.")
        inputs = settings.inputs(source)
        if self.path.exists() and aside.strangers(self.path):
            self._replace_or_resume(settings, inputs, overwrite)
        with disk.explained(self.path):
            self.ledger.begin(inputs)
            settings.save(self.settings_file)

    def _replace_or_resume(self, settings: Settings, inputs: dict[str, str], overwrite: bool) -> None:
        if not self.is_ours():
            raise OutputError(f"{self.path} is not empty and holds no run of headwise; choose another --out.")
        differs = self._difference(settings, inputs)
        if differs is None:
            return
        if not overwrite:
            raise OutputError(f"{self.path} holds {differs}; choose another --out or add --overwrite.")
        aside.set_aside(self.path, OWN)

    def _difference(self, settings: Settings, inputs: dict[str, str]) -> str | None:
        """Why a run with these settings and inputs cannot be resumed here; None if it can."""
        try:
            if self.is_finished():
                return "a finished run"
            if not self.settings_file.exists():
                return None
            before = Settings.read(self.settings_file)
        except HeadwiseError as error:
            return f"a run that cannot be read ({error})"
        if not settings.goes_on(before):
            return f"an unfinished run with other settings ({settings.difference(before)}); run it with the same ones"
        if changed := fingerprint.difference(self.ledger.read().inputs, inputs):
            return f"an unfinished run that began with another {changed}; restore it"
        return None

    def same_inputs(self, source: str) -> None:
        """Refuse to work on with other inputs than the run began with."""
        if not self.ledger.complete or not is_first():
            return
        if changed := fingerprint.difference(self.ledger.read().inputs, self.require().inputs(source)):
            raise OutputError(
                f"{changed} changed since the run in {self.path} began; restore it, or begin again: headwise probe or "
                f"run with --out {self.path} --overwrite."
            )

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """While a new run takes the place of an earlier one: that one goes when the new one is finished, and comes back
        where the new one turns out to be impossible before it has built a model.
        """
        try:
            yield
        except (BudgetError, DataError, ModelError, PlanError, ShapeError, UnknownNameError):
            if is_first() and (self.path / aside.PREVIOUS).exists() and self.ledger.stage("model") is None:
                aside.put_back(self.path, OWN)
            raise
        if is_first():
            aside.drop(self.path)

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

    def write_plan(self, plan: Plan, settings: Settings | None = None) -> None:
        """Write the plan, made under these settings; an older one is kept beside it."""
        if self.plan_file.exists() and not self._holds(plan):
            write_atomically(self.path / "plan.previous.json", self.plan_file.read_bytes())
        plan.save(self.plan_file)
        self.ledger.record("plan", ("plan.json",), ("readings.json",), settings.asked(PLANNED) if settings else {})

    def _holds(self, plan: Plan) -> bool:
        try:
            return Plan.read(self.plan_file) == plan
        except PlanError:  # damaged
            return False

    def has_probed(self) -> bool:
        """Whether readings and moments are finished; an earlier version wrote the readings last."""
        if self.ledger.complete or self.ledger.stage("probe"):
            return self.ledger.current("probe")
        return self.readings_file.exists() and (self.moments_file.exists() or self.streaming.exists())

    def has_built(self, settings: Settings) -> bool:
        """Whether plan and model are finished, and are those that these settings ask for."""
        planned = self.ledger.current("plan", settings.asked(PLANNED))
        return planned and self.ledger.current("model", settings.asked(HEALED))

    def record_model(self, settings: Settings, made: tuple[str, ...]) -> None:
        """Commit a model that is written; what was said of an older one goes."""
        self.ledger.record("model", made, ("plan.json",), settings.asked(HEALED), ends=("verdict", "report"))
        for stale in (self.verdict_file, self.report_file, self.card_file):
            stale.unlink(missing_ok=True)

    def record_verdict(self, verdict: Verdict, more: tuple[str, ...] = ()) -> None:
        """Write a verdict and commit it, for the plan and the model that are there; `more` was written with it."""
        used = tuple(name for name in ("plan.json", "model", "heal.json") if name not in more)
        if not self.ledger.complete:  # an earlier version's model, which was found to follow the plan
            self.ledger.record("model", used[1:], used[:1])
        verdict.save(self.verdict_file)
        self.ledger.record("verdict", ("verdict.json", *more), used, ends=("report",))

    def require_model(self) -> None:
        """Refuse to verify a model that is not finished or does not belong to the plan."""
        differs = self.ledger.difference("model")
        if not self.ledger.complete:  # an earlier version's
            there = all(path.exists() for path in (self.plan_file, self.model, self.heal_file))
            differs = None if there else "model"
        if differs == "plan.json":
            raise PlanError(f"{self.model} does not follow plan.json; run: headwise heal {self.path}")
        if differs is not None:
            raise PlanError(f"{self.path} holds no finished model yet; run: headwise heal {self.path}")

    def verdict(self) -> tuple[Verdict | None, str | None]:
        """The verdict on the plan and the model that are there, or why there is none (None: not verified yet)."""
        differs = self.ledger.difference("verdict")
        if differs is None:
            return Verdict.read(self.verdict_file), None
        if not self.verdict_file.exists() or (differs == "verdict" and self.ledger.complete):
            return None, None
        return None, UNVERIFIED.get(differs, f"{differs} changed after the model was verified")

    def write_json(self, path: Path, data: dict[str, Any], indent: int | None = 1) -> None:
        """Write a plain dictionary atomically."""
        write_atomically(path, json.dumps(data, indent=indent) + "\n")

    def dossier(self) -> Dossier:
        """Everything in the folder; stages that have not run are None."""
        settings = self.require()
        readings = Readings.read(self.readings_file) if self.readings_file.exists() else None
        plan = self.read_plan() if self.plan_file.exists() else None
        built = self.ledger.current("model") if self.ledger.complete else self.heal_file.exists()
        healing = read_healing(self.heal_file) if built else None
        verdict, unverified = self.verdict()
        rivals = _baselines(readings, plan, settings) if readings and plan else ()
        sweep = None
        if readings and plan:
            if ModelShape.from_json(readings.shape).layers != plan.source.layers:
                raise PlanError(
                    f"{self.plan_file} and {self.readings_file.name} are of different models; allocate again."
                )
            mark = frontier.fingerprint(readings, plan, settings.allow)
            sweep = frontier.stored(self.frontier_file, mark, len(plan.keep))
        described = {**settings.to_json(), **self._followed(), "versions": _versions()}
        return Dossier(described, readings, plan, healing, verdict, rivals, sweep, unverified)

    def _followed(self) -> dict[str, Any]:
        """The settings that plan and model really follow, where stages were asked for others than the run."""
        stages = [stage for name in ("plan", "model") if (stage := self.ledger.stage(name))]
        return {name: json.loads(text) for stage in stages for name, text in stage.asked.items()}


UNVERIFIED = {
    "verdict": "this run has no record of what was verified: it was made by an earlier version",
    "plan.json": "the plan changed after the model was verified",
    "model": "the model changed after it was verified",
    "heal.json": "the model changed after it was verified",
}


def _is_record(path: Path) -> bool:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "headwise" in found


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


HEALING: dict[str, type | tuple[type, ...]] = {"method": str, "layers": list, "rounds": list, "curve": list}
HEALING_NUMBERS = ("rehearsed", "rehearsed_before", "tokens", "seconds", "rate", "tokens_per_second")


def read_healing(path: Path, *needed: str) -> dict[str, Any]:
    """What a healing did, from heal.json. `needed` fields must be there; known ones must be of their kind."""
    found = read_object(path, advice="run headwise heal again")
    for name, kind in HEALING.items():
        if name in found and not isinstance(found[name], kind):
            raise PlanError(f"{path}: {name} is {shortened(found[name])}; run headwise heal again.")
    for name in HEALING_NUMBERS:
        if found.get(name) is not None and not is_number(found[name]):
            raise PlanError(
                f"{path}: {name} is {shortened(found[name])}, not a finite number; run headwise heal again."
            )
    if lost := [name for name in ("method", *needed) if found.get(name) is None]:
        raise PlanError(f"{path} does not say {lost[0]}; run headwise heal again.")
    return found


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

    with folder.held("report"):
        dossier = _with_sweep(folder, folder.dossier())
        write_atomically(folder.card_file, model_card(dossier))
        write_atomically(folder.report_file, render(dossier))
        used = ("plan.json", "heal.json", *(["verdict.json"] if dossier.verdict else []))
        folder.ledger.record("report", ("report.html", "report.md"), used)
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
