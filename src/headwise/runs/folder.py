"""One run, one folder: its settings, the files of each stage, and which stages are finished. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.errors import HeadwiseError, OutputError, PlanError
from headwise.files import disk
from headwise.files.card import facts_of, short_card
from headwise.files.json import read_bytes, read_object
from headwise.runs import aside, fingerprint, reuse
from headwise.runs.dossier import Dossier
from headwise.runs.finished import Ledger
from headwise.runs.healing import read_healing
from headwise.runs.lock import is_first, locked
from headwise.runs.settings import Settings as Settings
from headwise.types import LatencyTable, Plan, Readings, Verdict, Workload, write_atomically

OWN = (
    "run.json", "finished.json", "readings.json", "moments.safetensors", "streaming", "probing", "rounds", "plan.json",
    "plan.previous.json", "heal.json", "healing", "model", "proof.safetensors", "verdict.json", "serving.json",
    "frontier.json", "report.html", "report.md", "latency-*.json",
)  # fmt: skip  # everything that a run writes; other files in its folder are not touched
CLAIM = ("run.json", "finished.json")  # written before the first result
WORK = ("streaming", "probing", "rounds", "healing")  # subfolders in which work is kept that a kill would lose
FOLLOWED = {  # settings that a stage follows
    "plan": ("budgets", "strategy", "allow", "portable", "serve", "multiple", "same_dims", "seed"),
    "model": ("heal", "heal_options"),
}


class RunFolder:
    """The files of a run: where they are, which are finished, how they are read and recorded."""

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
        self.serving_file = self.path / "serving.json"  # what an engine made of the model
        self.frontier_file = self.path / "frontier.json"
        self.report_file = self.path / "report.html"
        self.card_file = self.path / "report.md"
        self.model_card_file = self.model / fingerprint.CARD  # the same, for the Hub
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
        traces = (self.settings_file, self.ledger.file, self.path / aside.PREVIOUS, self.path / aside.MOVING)
        if not new and not any(path.exists() for path in traces):
            self.require()  # which says that there is no run: nothing is written into a folder of somebody else
        with disk.explained(self.path), locked(self.path, command) as taken:
            if taken:
                disk.refuse_pipes(self.path)
                self.recover()
            yield

    def recover(self) -> None:
        """Complete or undo what a kill interrupted."""
        aside.undo_move(self.path)
        disk.recover(self.path, WORK)
        if (self.path / aside.PREVIOUS).exists() and self.finished("report"):  # killed before it deleted the old one
            aside.drop(self.path)

    def is_ours(self) -> bool:
        """Whether Headwise made a run here; files of the same name that somebody else wrote do not count."""
        return any(_is_record(path) for path in (self.settings_file, self.ledger.file))

    def finished(self, stage: str, settings: Settings | None = None) -> bool:
        """Whether a stage (probe, plan, model, verdict or report) is finished, so that a run need not do it again.

        It is if its files are those that it wrote, and what it was made from is as it was. With `settings`, it must
        have followed these; for a model, so must its plan. A report counts once it shows a verdict: it may be edited.
        """
        if stage == "report":
            record = self.ledger.stage(stage)
            return record is not None and bool(record.used.get("verdict.json")) and self.report_file.exists()
        if settings is None:
            return self.ledger.current(stage)
        planned = stage != "model" or self.finished("plan", settings)
        return planned and self.ledger.current(stage, settings.asked(FOLLOWED[stage]))

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
        replacing = RunFolder(self.path / aside.PREVIOUS).is_ours()  # killed before the new run had a file
        if not self.is_ours() and not replacing:
            raise OutputError(f"{self.path} is not empty and holds no run of headwise; choose another --out.")
        differs = self._difference(settings, inputs)
        if differs is None:
            return
        if not overwrite:
            end = "" if differs.endswith("; or") else ";"
            raise OutputError(f"{self.path} holds {differs}{end} choose another --out or add --overwrite.")
        aside.set_aside(self.path, OWN)

    def _difference(self, settings: Settings, inputs: dict[str, str]) -> str | None:
        """Why a run with these settings and inputs cannot be resumed here; None if it can."""
        try:
            done = self.finished("report")
            if not self.settings_file.exists():
                return "a finished run" if done else None
            before = self._asked()
        except HeadwiseError as error:
            return f"a run that cannot be read ({error})"
        if settings.resumes(before) and done:
            return f"a finished run with these settings (see {self.report_file})"
        if not settings.resumes(before):
            kind, way = ("a finished run", "") if done else ("an unfinished run", "; run it with the same ones")
            again = reuse.commands(self.path, settings, before) if self.finished("probe") else None
            way += f"; to change it and keep its readings, type: {again}; or" if again else ""
            return f"{kind} with other settings ({settings.difference(before)}){way}"
        if changed := fingerprint.difference(self.ledger.read().inputs, inputs):
            return f"an unfinished run that began with another {changed}; restore it"
        return None

    def same_inputs(self, source: str) -> None:
        """Refuse inputs that changed since the run began."""
        known = self.ledger.read().inputs
        if not known or not is_first():
            return
        if changed := fingerprint.difference(known, self.require().inputs(source)):
            raise OutputError(
                f"{changed} changed since the run in {self.path} began; restore it, or begin again: headwise probe or "
                f"run with --out {self.path} --overwrite."
            )

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """While a new run takes the place of an earlier one: the earlier one is deleted when the new one is finished.

        It is put back where the new run turns out to be impossible before it has a model: by its budget, data, model or
        plan. Other errors, such as a full disk, do not count: the new run can resume.
        """
        try:
            yield
        except HeadwiseError as error:
            impossible = type(error) not in (HeadwiseError, OutputError) and self.ledger.stage("model") is None
            if impossible and is_first():
                aside.give_back(self.path, OWN, CLAIM)
            raise
        if is_first():
            aside.drop(self.path)

    def require(self) -> Settings:
        """The settings of an existing run."""
        if not self.settings_file.exists():
            begin = f"headwise run MODEL --budget kv=25% --out {self.path}"
            raise OutputError(f"{self.path} holds no run of headwise; begin with: {begin}")
        return Settings.read(self.settings_file)

    def table_file(self, work: Workload) -> Path:
        """The file with the measured times of a workload."""
        return self.path / f"latency-{work.phase}-{work.length}-b{work.batch}.json"

    def table(self, work: Workload) -> LatencyTable | None:
        """The measured times of a workload, or None."""
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
        """Write and record a plan that follows these settings; an older one is kept as plan.previous.json."""
        if self.plan_file.exists() and not self._holds(plan):
            with suppress(PlanError):  # it is no regular file
                write_atomically(self.path / "plan.previous.json", read_bytes(self.plan_file))
        plan.save(self.plan_file)
        self.ledger.record(
            "plan", ("plan.json",), ("readings.json",), settings.asked(FOLLOWED["plan"]) if settings else {}
        )

    def _holds(self, plan: Plan) -> bool:
        try:
            return Plan.read(self.plan_file) == plan
        except PlanError:  # damaged
            return False

    def record_model(self, settings: Settings, made: tuple[str, ...]) -> None:
        """Record a model that is written; verdict and report of an older one are deleted."""
        self.ledger.record("model", made, ("plan.json",), settings.asked(FOLLOWED["model"]), ends=("verdict", "report"))
        for stale in (self.verdict_file, self.serving_file, self.report_file, self.card_file):
            stale.unlink(missing_ok=True)

    def record_verdict(self, verdict: Verdict, more: tuple[str, ...] = ()) -> None:
        """Write a verdict on the plan and the model that are there, and record it; `more` was written with it."""
        used = tuple(name for name in ("plan.json", "model", "heal.json") if name not in more)
        for stale in (self.report_file, self.card_file):
            stale.unlink(missing_ok=True)
        self.write_card(None)
        verdict.save(self.verdict_file)
        self.ledger.record("verdict", ("verdict.json", *more), used, ends=("report",))

    def write_card(self, text: str | None) -> None:
        """Write the card in the model's folder; without a text a short one, where an earlier verdict's was."""
        if self.model.is_dir():
            text = short_card(facts_of(self.model_card_file)) if text is None else text
            write_atomically(self.model_card_file, text, beside=self.path)

    def require_model(self) -> None:
        """Refuse to verify a model that is not finished or does not belong to the plan."""
        if self.finished("model"):
            return
        differs = self.ledger.difference("model") or "model"
        if self.ledger.stage("model") is None:
            raise PlanError(f"{self.path} holds no finished model yet; run: headwise heal {self.path}")
        if differs == "plan.json":
            raise PlanError(f"{self.model} does not follow plan.json; run: headwise heal {self.path}")
        raise PlanError(f"{self.path / differs} is not what Headwise wrote; run: headwise heal {self.path}")

    def verdict(self) -> tuple[Verdict | None, str | None]:
        """The verdict on the plan and the model that are there, or why there is none (None: not verified yet)."""
        differs = self.ledger.difference("verdict")
        if differs is None:
            return Verdict.read(self.verdict_file), None
        if not self.verdict_file.exists() or differs == "verdict":
            return None, None
        return None, UNVERIFIED.get(differs, f"{differs} changed after the model was verified")

    def write_json(self, path: Path, data: dict[str, Any], indent: int | None = 1) -> None:
        """Write a plain dictionary atomically."""
        write_atomically(path, json.dumps(data, indent=indent) + "\n")

    def dossier(self) -> Dossier:
        """Everything that the files say; stages that are not finished are None. The report adds what it solves."""
        verdict, unverified = self.verdict()
        readings = Readings.read(self.readings_file) if self.readings_file.exists() else None
        plan = self.read_plan() if self.plan_file.exists() else None
        if readings and plan and readings.source.layers != plan.source.layers:
            raise PlanError(f"{self.plan_file} and {self.readings_file.name} are of different models; allocate again.")
        return Dossier(
            settings=self._asked(),
            readings=readings,
            plan=plan,
            healing=read_healing(self.heal_file) if self.finished("model") else None,
            verdict=verdict,
            unverified=unverified,
            versions=_versions(),
            folder=str(self.path),
        )

    def _asked(self) -> Settings:
        """The settings of the run, and those that plan and model really follow."""
        return Settings.from_json({**self.require().to_json(), **self._followed()}, self.ledger.file.name)

    def _followed(self) -> dict[str, Any]:
        """The settings that plan and model really follow, where a later command gave others than the run."""
        stages = [stage for name in ("plan", "model") if (stage := self.ledger.stage(name))]
        try:
            return {name: json.loads(text) for stage in stages for name, text in stage.asked.items()}
        except (ValueError, RecursionError):
            raise PlanError(f"{self.ledger.file} is damaged; delete it, then: headwise heal {self.path}") from None


UNVERIFIED = {
    "plan.json": "the plan changed after the model was verified",
    "model": "the model changed after it was verified",
    "heal.json": "the model changed after it was verified",
}


def _is_record(path: Path) -> bool:
    try:
        return "headwise" in read_object(path)
    except HeadwiseError:
        return False


def _versions() -> dict[str, str]:
    out = {"headwise": __version__}
    for package in ("torch", "transformers", "scipy"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out
