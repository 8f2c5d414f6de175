"""Distillation: the whole cut model learns the source's answers, end to end.

The divergence from the source's answers is learned, not the text: on little text plain training makes even an uncut
model worse, while the source's whole distribution says what was lost. The rate is found by trial, some calibration rows
are kept to choose by, the best state on them is what comes out, and it is never worse there than the start.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import processes
from headwise.data import count_tokens
from headwise.errors import HeadwiseError
from headwise.heal import _lora, _rate
from headwise.heal._answers import Answers
from headwise.heal._balance import balance
from headwise.heal._course import Course, divided
from headwise.heal._job import Job, together
from headwise.heal._lesson import Lesson
from headwise.runs.heal_options import Options
from headwise.tasks.causal import Causal
from headwise.training import checkpoint
from headwise.training.logs import Logs
from headwise.training.loop import FitSettings, State
from headwise.types import write_atomically

NAME = "distill"
MEANING = "the whole model learns the source's answers, minutes to hours, best on a GPU"
AFTER = "refit"
OPTIONS = (
    "tokens", "steps", "rate", "batch", "micro", "lora", "match", "cache", "recompute", "truth", "embeddings", "shard",
    "blockwise",
)  # fmt: skip
TOGETHER = True  # processes share the work

EPOCHS = 8  # times that the calibration text is read, unless tokens or steps are given
STEPS = 1000  # to aim at: many small steps heal more than few large ones
BATCH = {"cuda": (8_192, 32_768), "cpu": (1_024, 4_096)}  # tokens of a step, at least and at most
MICRO = {"cuda": 16_384, "cpu": 4_096}  # tokens computed at once
SAVE_MINUTES = 10.0
FIRST = 0.5  # share of the tokens asked for that layers learn from first, each by itself
RATE = 0.01  # theirs: on much text twice what blockwise takes by itself heals more of heavy damage
MOST = 1 << 21  # tokens of these, unless a share is given: processes do not share that work


def stages(options: Options) -> list[tuple[str, Options]]:
    """The refit, the layers' own lessons where a number of tokens is asked for, and these, with the tokens left.

    What layers learn from a token, of every stream, is worth more at first than what the answers tell the whole model.
    """
    tokens, share = options.tokens or 0, options.blockwise
    first = round(tokens * share) if share is not None else min(MOST, round(tokens * FIRST))
    if not first:
        return [(AFTER, options), (NAME, options)]
    layers = Options(tokens=first, rate=RATE, side_by_side=options.side_by_side, attention=options.attention)
    own = replace(options, tokens=tokens - first, blockwise=first / tokens)  # noted: another share is another start
    return [(AFTER, options), ("blockwise", layers), (NAME, own)]


def heal(job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """The cut model after its lessons, or as it was where they did not help; and how it went."""
    return _Healing(job).go()


class _Healing:
    """One healing: the course, its settings, and what is kept in the job's folder."""

    def __init__(self, job: Job) -> None:
        self.job, options = job, job.options
        self.device = next(job.cut.parameters()).device
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        student = self._student()
        more: dict[str, Any] = {"recompute": bool(options.recompute), "truth": options.truth or 0.0}
        lesson = Lesson(job.family, job.task, job.source, student, options.match or 0.0, **more)
        learned, watched = divided(job.calibration, self.device)
        learned = learned if job.more is None else together(learned, job.more)
        tokens = options.tokens or EPOCHS * count_tokens(learned.inputs, learned.row)
        batch = options.batch or max(BATCH[kind][0], min(BATCH[kind][1], tokens // STEPS))
        micro = options.micro or MICRO[kind]
        self.course = Course(lesson, learned, watched, batch, micro, job.seed)
        self.shared = bool(options.shard) and processes.count() > 1
        if not (self.shared and isinstance(job.task, Causal)):  # nothing of a decoder is idle, and gradients are large
            self.course.freeze_idle()
        steps = options.steps or max(1, round(tokens / self.course.tokens_of_step))
        self.fitting = FitSettings(
            steps=steps,
            rate=options.rate or 1.0,  # until it is found
            warm_up=0.1,
            last_rate=0.0,
            decay=0.0,
            beta2=0.95,
            accumulate=self.course.parts,
            seed=job.seed,
            point_every=max(1, steps // 100),
            evaluate_every=max(1, steps // 10),
        )
        self.folder = None if job.folder is None else job.folder / NAME
        self._claim()
        self.best: dict[str, torch.Tensor] = {}
        self.saved_at = time.monotonic()

    def _student(self) -> nn.Module:
        """A copy of the cut model that is ready to learn."""
        student = self.job.family.tailor(self.job.cut)
        balance(self.job.family, student)
        learnable(self.job, student)
        return student

    def _claim(self) -> None:
        """Go on with what the same healing left behind; delete what another one did."""
        if self.folder is None:
            return
        folder, about = self.folder, self.folder / "about.json"
        facts = {
            "options": asdict(self.job.options.fixed()),
            "steps": "in shares of sizes",
            "fit": {k: v for k, v in self.fitting.to_json().items() if k != "accumulate"},
            "shapes": self.job.cut.config.headwise,
            "rows": [
                self.course.rows,
                len(self.course.learned.inputs),
                float(self.course.learned.inputs.double().sum()),
            ],
        }
        text = json.dumps(facts, sort_keys=True, default=str) + "\n"

        def take() -> None:
            if not (about.is_file() and about.read_bytes() == text.encode()):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(about, text)

        processes.by_first(take)

    def go(self) -> tuple[nn.Module, dict[str, Any]]:
        """Judge, try rates, learn, and give back the best."""
        try:
            self._ask()
            with self._room():
                return self._go()
        except torch.OutOfMemoryError:
            raise HeadwiseError(
                f"the device has too little memory to heal on {self.course.parts} parts of a step; add --heal-option "
                f"micro={max(256, self.job.options.micro or MICRO['cuda']) // 4}, --heal-option recompute=1 or "
                "--heal-option lora=16."
            ) from None

    def _ask(self) -> None:
        """Store the source's answers, if they are to be stored."""
        course, job = self.course, self.job
        if job.options.cache and isinstance(job.task, Causal):
            count = min(job.options.cache, job.source.config.vocab_size - 1)
            where = None if self.folder is None else self.folder / "answers"
            course.answers = Answers(course.lesson, course.learned, count, where, self.device, job.track)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Where processes share the weights, the whole models wait on the host."""
        aside = (self.job.source, self.job.cut) if self.shared else ()
        try:
            for model in aside:
                model.to("cpu")
            yield
        finally:
            for model in aside:
                model.to(self.device)

    def _go(self) -> tuple[nn.Module, dict[str, Any]]:
        course, job = self.course, self.job
        course.spread(self.shared)
        start, trials = self._start()
        rate = job.options.rate or _rate.best(trials, self.fitting)
        if rate is None:
            return job.family.tailor(job.cut).to(self.device), self._record(None, start, start, trials)
        self.fitting = FitSettings(**{**self.fitting.to_json(), "rate": rate})
        state = course.state(self.fitting)
        after = self._learn(state, start)
        if not self.best:
            return job.family.tailor(job.cut).to(self.device), self._record(state, start, start, trials)
        return self._healed(), self._record(state, start, after, trials)

    @torch.no_grad()
    def _healed(self) -> nn.Module:
        """An ordinary model with the best weights."""
        student = self._student()
        found = dict(student.named_parameters(prefix="student"))
        for name, tensor in self.course.whole(self.best).items():
            found[name].copy_(tensor)
        _lora.merge(student)
        return student.requires_grad_(True).eval().to(self.device)

    def _start(self) -> tuple[dict[str, float], list[dict[str, float]]]:
        """What `judge` says before anything is learned, and what trials of rates found; kept for a second start."""
        path = None if self.folder is None else self.folder / "trials.json"
        if path is not None and path.exists():
            return _rate.read_trials(path)
        start = self.course.judge()
        trials: list[dict[str, float]] = []
        if self.job.options.rate is None:

            def said(rate: float) -> Any:
                return self.job.track(range(_rate.steps_of(self.fitting)), f"trial at {rate:g}")

            trials = _rate.tried(self.course, self.fitting, start, said)
        if path is not None:
            text = json.dumps({"start": start, "trials": trials}) + "\n"
            processes.by_first(lambda: write_atomically(path, text))
        return start, trials

    def _learn(self, state: State, start: dict[str, float]) -> dict[str, float]:
        """All steps from the beginning or the newest checkpoint on; returns what `judge` says of the best state."""
        course, least = self.course, start
        if self.folder is not None and checkpoint.restore(self.folder, course.lesson, state):
            kept = checkpoint.kept_in(self.folder)
            least = dict(zip(start, kept.pop("least").tolist(), strict=True))
            self.best = course.parts_of(kept)
        logs = None
        if self.folder is not None and self.job.folder is not None:
            logs = Logs(self.job.folder.parent / NAME, state.curve, processes.index() == 0)

        def after(state: State) -> None:
            nonlocal least
            new = logs.write(state.curve) if logs is not None else False
            last = state.curve[-1] if state.curve else None
            judged = last.evaluation if last is not None and last.step == state.step else None
            if judged is not None and judged["loss"] < least["loss"]:
                least, self.best = judged, course.copy()
            if self.folder is not None and (judged is not None or (new and self._late())):
                self._save(self.folder, state, least)

        try:
            course.learn(self.fitting, state, self._bar(state), course.judge, after)
        except HeadwiseError as error:
            if "diverged" not in str(error):
                raise
        finally:
            if logs is not None:
                logs.close()
        return least

    def _late(self) -> bool:
        """Whether it is time for a checkpoint; the first process decides for all."""
        late = torch.tensor(float(time.monotonic() - self.saved_at > 60 * SAVE_MINUTES))
        return bool(processes.agreed(late))

    def _save(self, folder: Path, state: State, least: dict[str, float]) -> None:
        state.sums = processes.total(state.sums) / processes.count()  # alike everywhere, as they will be on return
        more = {"least": torch.tensor(list(least.values()), dtype=torch.float64), **self.course.whole(self.best)}
        checkpoint.save(folder, self.course.lesson, state, more, processes.index() == 0)
        processes.wait()
        self.saved_at = time.monotonic()

    def _bar(self, state: State) -> Iterable[object]:
        """Progress with loss and speed."""
        per_step, first = self.course.tokens_of_step, state.step
        begun = time.perf_counter()

        def label() -> str:
            loss = f" {state.curve[-1].loss:.4f}" if state.curve else ""
            speed = (state.step - first) * per_step / max(1e-9, time.perf_counter() - begun)
            return f"distill{loss}, {speed:,.0f} tokens/s"

        return self.job.track(range(state.step, self.fitting.steps), label)

    def _record(
        self,
        state: State | None,
        before: dict[str, float],
        after: dict[str, float],
        trials: list[dict[str, float]],
    ) -> dict[str, Any]:
        """What heal.json says."""
        course, steps = self.course, 0 if state is None else state.step
        spent = sum(row["rate"] > 0 for row in trials) * _rate.steps_of(self.fitting)
        curve = [] if state is None else state.curve
        return {
            "tokens": round((steps + spent) * course.tokens_of_step),
            "steps": steps,
            "rate": None if state is None else self.fitting.rate,
            "trials": trials,
            "batch_tokens": round(course.tokens_of_step),
            "divergence_before": before["divergence"],
            "divergence_after": after["divergence"],
            "tokens_per_second": course.tokens_of_step * steps / state.seconds if state and state.seconds else None,
            "processes": processes.count(),
            "shared_weights": self.shared,
            "curve": [
                {"step": p.step, "loss": p.loss, **({"held_out": p.evaluation["divergence"]} if p.evaluation else {})}
                for p in curve
            ],
        }


def learnable(job: Job, student: nn.Module) -> None:
    """Let the layers learn; embeddings and head are the source's own and stay unless asked.

    With a rank, only low-rank changes.
    """
    student.requires_grad_(False)
    layers = job.family.layers(student)
    for module in [student] if job.options.embeddings else layers:
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point() and parameter.numel() > 0)
    if job.options.lora:
        _lora.add(layers, job.options.lora, job.seed)
