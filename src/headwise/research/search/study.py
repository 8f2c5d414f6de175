"""The study: each trial trains one shape for a while and is given up if it falls behind.

Trials are kept in Optuna's storage. So a study resumes after a kill, and several workers, on one machine or on many
that see the same storage, can share it: each runs the same command. Trials are compared by their held-out loss.
"""

import glob
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import budgets as prices
from headwise import cost, data
from headwise.devices import chosen
from headwise.errors import BudgetError, DataError, HeadwiseError
from headwise.research.designs import configs
from headwise.research.designs.proposals import train_flops
from headwise.research.designs.shapes import Sketch
from headwise.research.search import front, space
from headwise.research.search.settings import SearchSettings
from headwise.research.train.model import read_tokenizer
from headwise.training.loop import FitSettings, fit
from headwise.types import ModelShape

LOOKS = 6  # evaluations of a trial
HELD_OUT = 10  # one block of so many is held out
START_UP = 4  # trials that are never given up
STALE = 10  # seconds until the journal's lock counts as left behind by a worker that was killed


class Trials:
    """What all trials of a worker share: text, budgets, and the family's way to make models."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings, device = settings, chosen(settings.device)
        tokenizer = read_tokenizer(settings.tokenizer)
        count = max(2 * HELD_OUT, settings.tokens // settings.length)
        texts = data.documents(settings.data, settings.seed)
        blocks = data.blocks_of(texts, tokenizer, settings.length, count, settings.data)
        if len(blocks) < 2:
            raise DataError(f"{settings.data} has one block of {settings.length} tokens; give more text, or --length.")
        judged = torch.arange(len(blocks)) % min(HELD_OUT, len(blocks)) == 0
        self.train, self.held = (blocks[part].to(device) for part in (~judged, judged))
        self.maker = configs.Maker(settings.family, len(tokenizer), settings.length)
        self.make = self.maker.make
        if shares := [text for text in settings.budget if "%" in text]:
            raise BudgetError(f"{shares[0]}: a search has no model to take a percentage of; write it as params=5M.")
        reference = self.make(Sketch(256, 4, 4, 64, 1024))
        self.budgets = tuple(prices.parse(text, reference) for text in settings.budget)
        self.rules = self.maker.rules(False, depth=settings.depth, length=settings.length)

    def batch(self, step: int) -> torch.Tensor:
        """Rows of a step; every trial gets the same in the same step."""
        rng = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)
        rows = torch.randint(len(self.train), (self.settings.batch,), generator=rng)
        return self.train[rows.to(self.train.device)]

    def judge(self, model: nn.Module) -> float:
        """Held-out loss."""
        parts = self.held[: 8 * self.settings.batch].split(self.settings.batch)
        losses = [float(model(input_ids=rows, labels=rows).loss) * len(rows) for rows in parts]
        return sum(losses) / sum(map(len, parts))

    def objective(self, trial: Any) -> float:
        """Train one shape; its held-out loss. A trial that falls behind ends early."""
        import optuna

        try:
            shape, rate = space.suggest(trial, self.make, self.budgets, self.rules)
        except BudgetError as error:
            raise optuna.TrialPruned(str(error)) from None
        self.note(trial, shape)
        torch.manual_seed(self.settings.seed)
        model = configs.build(self.maker.config(shape), self.maker.kind.auto).to(self.train.device)
        looks: list[float] = []

        def look(now: nn.Module) -> Mapping[str, float]:
            looks.append(self.judge(now))
            trial.report(looks[-1], len(looks))
            if trial.should_prune():
                raise optuna.TrialPruned(f"loss {looks[-1]:.3f} after {len(looks)} of {LOOKS} looks")
            return {"loss": looks[-1]}

        steps = self.settings.steps
        plan = FitSettings(steps=steps, rate=rate, evaluate_every=max(1, steps // LOOKS), point_every=steps)
        start = time.perf_counter()
        fit(model, self.batch, plan, lambda m, rows: m(input_ids=rows, labels=rows).loss, evaluate=look)
        trial.set_user_attr("seconds", time.perf_counter() - start)
        return looks[-1]

    def note(self, trial: Any, shape: ModelShape) -> None:
        """What the shape is and costs, beside the trial."""
        trial.set_user_attr("parameters", cost.parameters(shape))
        trial.set_user_attr("train_flops_per_token", train_flops(shape, self.settings.length))
        trial.set_user_attr("hidden_size", shape.hidden_size)
        trial.set_user_attr("layers", [layer.to_json() for layer in shape.layers])

    def shape_of(self, found: Mapping[str, Any]) -> ModelShape:
        """The shape of a finished trial."""
        chosen = installed().trial.FixedTrial(dict(found["params"]))
        try:
            return space.suggest(chosen, self.make, self.budgets, self.rules)[0]
        except (KeyError, ValueError, TypeError):
            raise front.damaged(found["number"]) from None


def storage_of(where: str | None, out: Path) -> Any:
    """Optuna's storage: a database by address, a journal by file name, or a journal in the output folder."""
    optuna = installed()
    if where is not None and "://" in where:
        return where
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    path = out / "journal.log" if where is None else Path(where.removeprefix("journal:"))
    path.parent.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    lock = JournalFileOpenLock(str(path.resolve()), STALE)
    _mend(path, lock)
    with _readable(path):
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


@contextmanager
def _readable(where: Path | str) -> Iterator[None]:
    """Turn what Optuna says of a damaged storage into one line."""
    try:
        yield
    except (HeadwiseError, OSError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(f"the study in {where} cannot be read ({reason}); begin another with --out.") from None


def _mend(path: Path, lock: Any) -> None:
    """Remove what a worker that was killed left: names of its lock, and a line that it had not finished."""
    for name in path.parent.glob(f"{glob.escape(path.name)}.lock*.rename"):
        name.unlink(missing_ok=True)
    if not path.is_file():
        return
    lock.acquire()
    try:
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end and (file.seek(end - 1), file.read(1))[1] != b"\n":
                end -= 1
            file.truncate(end)
    finally:
        lock.release()


def installed() -> Any:
    """Optuna, or how to get it."""
    try:
        import optuna
    except ImportError:
        raise HeadwiseError('searching needs optuna; type: pip install "headwise[search]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def search(
    settings: SearchSettings,
    out: Path,
    storage: str | None = None,
    name: str = "headwise",
    minutes: float | None = None,
    watch: Callable[[int, int, float | None], None] = lambda done, wanted, best: None,
) -> tuple[Any, Trials]:
    """Run trials until the study has as many as wanted, those of all workers counted, or time is over."""
    optuna = installed()
    with _readable(storage or out):
        study = optuna.create_study(
            storage=storage_of(storage, out),
            study_name=name,
            load_if_exists=True,
            direction="minimize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=START_UP, n_warmup_steps=1),
        )
        _same(study, settings)
    study.sampler = optuna.samplers.TPESampler(seed=settings.seed + len(study.trials))
    shared, start = Trials(settings), time.perf_counter()
    while (done := finished(study)) < settings.trials:
        if minutes is not None and time.perf_counter() - start > 60 * minutes:
            break
        study.optimize(shared.objective, n_trials=1)
        watch(finished(study), settings.trials, best_value(study))
        if finished(study) == done and len(study.trials) > 20 * settings.trials:
            raise HeadwiseError("no trial ends; look at the study's failed trials, or begin another --study.")
    return study, shared


def _same(study: Any, settings: SearchSettings) -> None:
    """Refuse to resume a study of something else: its losses could not be compared."""
    wanted = {k: v for k, v in settings.to_json().items() if k not in ("trials", "device", "seed")}
    before = study.user_attrs.get("settings")
    if before is None:
        study.set_user_attr("settings", wanted)
    elif before != wanted:
        other = next(key for key in wanted if wanted[key] != before.get(key))
        raise HeadwiseError(
            f"the study in this storage was begun with {other} {before.get(other)}, not {wanted[other]}; give the "
            "same, or another --study or --storage."
        )


def finished(study: Any) -> int:
    """Trials that ran to their end or were given up."""
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.get_trials(deepcopy=False))


def best_value(study: Any) -> float | None:
    """The least loss so far."""
    values = [trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    return min(values) if values else None
