"""Distillation: the whole cut model is trained to give the source's answers, end to end.

The loss is the divergence from the source's answers, not from the text: on little text plain training makes even an
uncut model worse, while the source's whole distribution shows what was lost. The learning rate is found by trial, and
the state that is best on held-out calibration rows comes out; it is never worse there than the start.
"""

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from headwise import processes
from headwise.cuts.balance import balance
from headwise.data import count_tokens
from headwise.errors import HeadwiseError
from headwise.families import set_format
from headwise.heal import _lora, _rate
from headwise.heal._job import Job, together
from headwise.heal._loss import DistillationLoss
from headwise.heal._trainer import Trainer, Weights, divided
from headwise.runs.heal_options import Options
from headwise.tasks.causal import Causal
from headwise.training import checkpoint
from headwise.training.logs import Logs
from headwise.training.loop import Diverged, FitSettings, State
from headwise.types import Healing, LossPoint, write_atomically

NAME = "distill"
MEANING = "the whole model is trained to match the source's outputs; slow, best on a GPU"
AFTER = "refit"
OPTIONS = ("tokens", "steps", "rate", "batch", "micro", "lora", "recompute", "shard", "blockwise")
TOGETHER = True  # processes share the work

EPOCHS = 8  # times that the calibration text is read, unless tokens or steps are given
STEPS = 1000  # to aim at: many small steps heal more than few large ones
BATCH = {"cuda": (8_192, 32_768), "cpu": (1_024, 4_096)}  # tokens of a step, at least and at most
MICRO = {"cuda": 16_384, "cpu": 4_096}  # tokens computed at once
SAVE_MINUTES = 10.0
FIRST = 0.5  # share of the tokens for training layer by layer, before the whole model is trained
RATE = 0.01  # learning rate of these layers: on much text twice that of blockwise alone heals more of heavy damage
MOST = 1 << 21  # their tokens, unless a share is given: processes do not share that work


def stages(options: Options) -> list[tuple[str, Options]]:
    """The methods of a distillation in order, with their options: refit, blockwise if `tokens` is given, distill.

    Blockwise comes first because a token teaches more at first through every layer's stream than through the answers.
    """
    tokens, share = options.tokens or 0, options.blockwise
    first = round(tokens * share) if share is not None else min(MOST, round(tokens * FIRST))
    if not first:
        return [(AFTER, options), (NAME, options)]
    own = replace(options, tokens=tokens - first, blockwise=first / tokens)  # kept: another share is another start
    return [(AFTER, options), ("blockwise", Options(tokens=first, rate=RATE)), (NAME, own)]


def heal(job: Job) -> tuple[nn.Module, Healing]:
    """The distilled model, or a copy of the cut model where distillation did not help; and how it went."""
    return Distillation(job).run()


class Distillation:
    """One distillation: its trainer, its settings, and its files in the job's folder."""

    def __init__(self, job: Job) -> None:
        self.job, options, device = job, job.options, job.device
        kind = "cuda" if device.type == "cuda" else "cpu"
        loss = DistillationLoss(job.family, job.task, job.source, self._student(), bool(options.recompute))
        learned, held_out = divided(job.calibration, device)
        learned = learned if job.more is None else together(learned, job.more)
        tokens = options.tokens or EPOCHS * count_tokens(learned.inputs, learned.row)
        batch = options.batch or max(BATCH[kind][0], min(BATCH[kind][1], tokens // STEPS))
        self.trainer = Trainer(loss, learned, held_out, batch, options.micro or MICRO[kind], job.seed)
        self.shared = bool(options.shard) and processes.count() > 1
        if not (self.shared and isinstance(job.task, Causal)):  # a decoder uses all of itself, and gradients are large
            self.trainer.freeze_unused()
        steps = options.steps or max(1, round(tokens / self.trainer.tokens_of_step))
        self.fitting = FitSettings(
            steps=steps,
            rate=options.rate or 1.0,  # until it is found
            warm_up=0.1,
            last_rate=0.0,
            decay=0.0,
            beta2=0.95,
            accumulate=self.trainer.parts,
            seed=job.seed,
            point_every=max(1, steps // 100),
            evaluate_every=max(1, steps // 10),
        )
        self.folder = None if job.folder is None else job.folder / NAME
        if self.folder is not None:
            self._claim(self.folder)
        self.best: Weights = {}
        self.saved_at = time.monotonic()

    def _student(self) -> nn.Module:
        """A copy of the cut model in which the layers, or with the option `lora` low-rank changes of them, are trained.

        In float32, whatever its file has: steps are smaller than bfloat16 resolves. Embeddings and head are the
        source's own and stay as they are.
        """
        job, student = self.job, self.job.family.tailor(self.job.cut, share="ends").float()
        balance(job.family.blocks(student))
        student.requires_grad_(False)
        layers = job.family.layers(student)
        for parameter in (p for layer in layers for p in layer.parameters()):
            parameter.requires_grad_(parameter.is_floating_point() and parameter.numel() > 0)
        if job.options.lora:
            _lora.add(layers, job.options.lora, job.seed)
        return student

    def _claim(self, folder: Path) -> None:
        """Resume what the same distillation left behind; delete the work of another one."""
        trainer, about = self.trainer, folder / "about.json"
        facts = {
            "options": asdict(self.job.options.fixed()),
            "steps": "in shares of sizes",
            "fit": {k: v for k, v in self.fitting.to_json().items() if k != "accumulate"},
            "shapes": self.job.cut.config.headwise,
            "rows": [trainer.rows, len(trainer.learned.inputs), float(trainer.learned.inputs.double().sum())],
        }
        text = json.dumps(facts, sort_keys=True, default=str) + "\n"

        def take() -> None:
            if not (about.is_file() and about.read_bytes() == text.encode()):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(about, text)

        processes.by_first(take)

    def run(self) -> tuple[nn.Module, Healing]:
        """Try learning rates, train, and return the best model."""
        try:
            with self._whole_models_aside():
                return self._run()
        except torch.OutOfMemoryError:
            raise HeadwiseError(
                f"the device has too little memory to heal on {self.trainer.parts} parts of a step; add --heal-option "
                f"micro={max(256, self.job.options.micro or MICRO['cuda']) // 4}, --heal-option recompute=1 or "
                "--heal-option lora=16."
            ) from None

    @contextmanager
    def _whole_models_aside(self) -> Iterator[None]:
        """Where processes share the weights, the whole models are on the host meanwhile."""
        device, aside = self.job.device, (self.job.source, self.job.cut) if self.shared else ()
        try:
            for model in aside:
                model.to("cpu")
            yield
        finally:
            for model in aside:
                model.to(device)

    def _run(self) -> tuple[nn.Module, Healing]:
        trainer, job = self.trainer, self.job
        trainer.distribute(self.shared)
        start, trials = self._start()
        rate, state, after = job.options.rate or _rate.best(trials, self.fitting), None, start
        if rate is not None:
            self.fitting = replace(self.fitting, rate=rate)
            state = trainer.state(self.fitting)
            least = self._train(state, start)
            after = least if self.best else start
        model = self._healed() if self.best else job.family.tailor(job.cut).to(trainer.device)
        return model, self._record(state, start, after, trials)

    @torch.no_grad()
    def _healed(self) -> nn.Module:
        """An ordinary model with the best weights."""
        student = self._student()
        found = dict(student.named_parameters(prefix="student"))
        for name, tensor in self.trainer.gathered(self.best).items():
            found[name].copy_(tensor)
        _lora.merge(student)
        set_format(student, self.job.cut.dtype)
        return student.requires_grad_(True).eval().to(self.trainer.device)

    def _start(self) -> tuple[_rate.Trial, list[_rate.Trial]]:
        """The divergence before training and the trials of learning rates; kept for a run that resumes."""
        path = None if self.folder is None else self.folder / "trials.json"
        if path is not None and path.exists():
            return _rate.read_trials(path)
        start, trials = self.trainer.judge(), []
        if self.job.options.rate is None:
            steps = range(_rate.steps_of(self.fitting))
            trials = _rate.tried(
                self.trainer, self.fitting, start, lambda rate: self.job.track(steps, f"trial at {rate:g}")
            )
        if path is not None:
            text = json.dumps({"start": start, "trials": trials}) + "\n"
            processes.by_first(lambda: write_atomically(path, text))
        return start, trials

    def _train(self, state: State, start: _rate.Trial) -> _rate.Trial:
        """All steps, or those behind the newest checkpoint; returns what was judged of the best state."""
        trainer, least, logs = self.trainer, start, None
        if self.folder is not None and self.job.folder is not None:
            if checkpoint.restore(self.folder, trainer.loss, state):
                kept = checkpoint.kept_in(self.folder)
                least = dict(zip(start, kept.pop("least").tolist(), strict=True))
                self.best = trainer.own_parts(kept)
            logs = Logs(self.job.folder.parent / NAME, state.curve, processes.index() == 0)

        def after(state: State) -> None:
            nonlocal least
            new = logs.write(state.curve) if logs is not None else False
            last = state.curve[-1] if state.curve else None
            judged = last.evaluation if last is not None and last.step == state.step else None
            if judged is not None and judged["divergence"] < least["divergence"]:
                least, self.best = judged, trainer.copy()
            if self.folder is not None and (judged is not None or (new and self._save_is_due())):
                self._save(self.folder, state, least)

        try:
            trainer.train(self.fitting, state, self._progress(state), trainer.judge, after)
        except Diverged:
            pass  # the best state so far comes out
        finally:
            if logs is not None:
                logs.close()
        return least

    def _save_is_due(self) -> bool:
        """Whether it is time for a checkpoint, by the main process's clock."""
        return processes.agrees(time.monotonic() - self.saved_at > 60 * SAVE_MINUTES)

    def _save(self, folder: Path, state: State, least: _rate.Trial) -> None:
        state.sums = processes.total(state.sums) / processes.count()  # equal in all processes, as after a resume
        more = {"least": torch.tensor(list(least.values()), dtype=torch.float64), **self.trainer.gathered(self.best)}
        checkpoint.save(folder, self.trainer.loss, state, more)
        processes.wait()
        self.saved_at = time.monotonic()

    def _progress(self, state: State) -> Iterable[object]:
        """Progress with loss and speed."""

        def label() -> str:
            loss = f" {state.curve[-1].loss:.4f}" if state.curve else ""
            speed = state.step * self.trainer.tokens_of_step / max(1e-9, state.seconds)
            return f"distill{loss}, {speed:,.0f} tokens/s"

        return self.job.track(range(state.step, self.fitting.steps), label)

    def _record(
        self, state: State | None, before: _rate.Trial, after: _rate.Trial, trials: list[_rate.Trial]
    ) -> Healing:
        per_step, steps = self.trainer.tokens_of_step, 0 if state is None else state.step
        spent = sum(row["rate"] > 0 for row in trials) * _rate.steps_of(self.fitting)
        return Healing(
            NAME,
            tokens=round((steps + spent) * per_step),
            steps=steps,
            rate=None if state is None else self.fitting.rate,
            trials=tuple(trials),
            batch_tokens=round(per_step),
            divergence_before=before["divergence"],
            divergence_after=after["divergence"],
            tokens_per_second=per_step * steps / state.seconds if state and state.seconds else None,
            processes=processes.count(),
            shared_weights=self.shared,
            curve=tuple(
                LossPoint(p.step, p.loss, p.evaluation["divergence"] if p.evaluation else None)
                for p in (state.curve if state else ())
            ),
        )
