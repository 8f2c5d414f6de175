"""A training with its folder: data, model, loop, checkpoints, logs, the model that comes out, and its record."""

import datetime
import json
import math
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from headwise import cost, families
from headwise.errors import HeadwiseError, ModelError
from headwise.families._config import stored_dtype
from headwise.progress import Track
from headwise.progress.shown import following
from headwise.research.train import model
from headwise.research.train._source import TrainingRows
from headwise.research.train.claim import claim, held
from headwise.research.train.images import Images
from headwise.research.train.labelled import LabelledTexts
from headwise.research.train.settings import (
    TrainKeywords,
    TrainSettings,
    parts_of_step,
    rows_of_step,
    steps_of,
    usual_rate,
)
from headwise.research.train.texts import HiddenTokens, NextToken
from headwise.runs.keywords import with_keywords
from headwise.training import checkpoint
from headwise.training.accelerator import accelerator_for
from headwise.training.logs import Logs
from headwise.training.loop import FitSettings, Point, State, begin, fit
from headwise.training.order import Order
from headwise.types import write_atomically


@with_keywords(TrainSettings)
def train(
    config: str,
    data: str,
    out: Path | str,
    overwrite: bool = False,
    track: Track | None = None,
    progress: bool = True,
    **settings: Unpack[TrainKeywords],
) -> dict[str, Any]:
    """Train a model into a folder and return what training.json says. `settings` are the fields of `TrainSettings`.

    A training that was killed resumes with the same call, and ends as if it had not stopped. `track` wraps the loop
    over steps; without it progress is shown, unless `progress` is False.
    """
    wanted = TrainSettings(config=str(config), data=str(data), **settings)
    if not wanted.fresh:
        model.has_weights(wanted.config)  # what it refuses is refused before the folder is touched
    accelerator = accelerator_for(wanted.device)
    folder = Path(out)
    with held(folder, wanted), following(track, progress) as shown:
        if accelerator.is_main_process:
            claim(folder, wanted, overwrite)
        accelerator.wait_for_everyone()
        return Training(wanted, folder, accelerator).run(shown)


class Training:
    """One training: which model, on what data, and the folder it is written to."""

    def __init__(self, settings: TrainSettings, folder: Path, accelerator: Any) -> None:
        self.settings, self.folder, self.accelerator = settings, folder, accelerator
        self.device, self.processes = accelerator.device, accelerator.num_processes
        config = model.read_config(settings.config)
        self.stored = stored_dtype(config)
        self.task = model.task_for(settings, config)
        with accelerator.main_process_first():  # it writes what the others read
            self.tokenizer = None
            if self.task != "image_classification":
                self.tokenizer = model.tokenizer_for(settings, config, self.task, folder / "tokenizer")
            self.source = self._source(config)
        torch.manual_seed(settings.seed)
        self.model = model.build(settings, config, self.task).to(self.device)
        tuned = not settings.fresh and model.has_weights(settings.config)
        self.rows = rows_of_step(settings, self.source.row_tokens, self.source.default_rows)
        steps = steps_of(settings, self.source.train_rows, self.rows, self.source.row_tokens)
        self.fitting = FitSettings(
            steps=steps,
            rate=settings.rate or usual_rate(int(_width(config)), tuned),
            warm_up=settings.warm_up,
            decay=settings.decay,
            clip=settings.clip,
            accumulate=parts_of_step(self.rows, self.source.row_tokens, self.processes, settings.micro_tokens),
            seed=settings.seed,
            bf16=settings.bf16,
            compile=settings.compile,
            point_every=settings.point_every,
            evaluate_every=settings.eval_every or max(1, steps // 10),
        )
        self.tokens_of_step = self.rows * (self.source.mean_tokens or self.source.row_tokens)
        host = "cpu" if self.source.order_on_host else self.device
        self.order = Order(self.source.train_rows, self.rows, settings.seed, host)
        self.saved_at = time.monotonic()

    def _source(self, config: Any) -> TrainingRows:
        """The data of the task, and a configuration that fits it where that is left open."""
        settings, device = self.settings, self.device
        if self.task == "image_classification":
            images = Images(settings, int(getattr(config, "patch_size", 16) or 16), device)
            _fit_images(config, images, settings)
            return images
        length = min(settings.length, int(getattr(config, "max_position_embeddings", settings.length)))
        if config.model_type.removeprefix("headwise_") == "roberta":
            length = min(length, config.max_position_embeddings - config.pad_token_id - 1)
        if self.task == "classification":
            texts = LabelledTexts(settings, self.tokenizer, length, device, config)
            _name_labels(config, texts.labels.names)
            if config.pad_token_id is None:
                config.pad_token_id = texts.pad
            return texts
        kind = NextToken if self.task == "causal" else HiddenTokens
        return kind(settings, self.tokenizer, length, self.folder / "data", device)

    def batches(self, number: int) -> Any:
        """A batch for this process: its own rows of a step that all processes share."""
        step, part = divmod(number, self.fitting.accumulate)
        size = self.rows // (self.processes * self.fitting.accumulate)
        first = (part * self.processes + self.accelerator.process_index) * size
        mine = slice(first, first + size)
        generator = torch.Generator(device=self.device).manual_seed(self.settings.seed * 1_000_003 + step)
        draws = tuple(draw[mine] for draw in self.source.draw(self.rows, generator))
        return self.source.batch(self.order(step)[mine], draws)

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Mean and standard error over the held-out rows, which the processes share."""
        own = torch.arange(self.accelerator.process_index, self.source.eval_rows, self.processes)
        size = max(1, self.settings.micro_tokens // self.source.row_tokens)
        sums: dict[str, torch.Tensor] = {}
        for rows in own.split(size):
            for name, values in self.source.scores(module, self.source.eval_batch(rows)).items():
                values = values.double() if self.device.type != "mps" else values
                sums[name] = sums.get(name, 0) + torch.stack((values.sum(), values.square().sum()))
        found: dict[str, float] = {}
        count = self.source.eval_rows
        for name in sorted(sums):
            total, squares = self.accelerator.reduce(sums[name], "sum").tolist()
            spread = max(0.0, squares / count - (total / count) ** 2)
            found[name] = total / count
            found[f"{name}_se"] = math.sqrt(spread / (count - 1)) if count > 1 else 0.0
        return found

    def run(self, track: Track) -> dict[str, Any]:
        """Train from the beginning or the newest checkpoint to the end."""
        state = begin(self.model, self.fitting, self.accelerator)
        checkpoints = self.folder / "checkpoints"
        resumed = checkpoint.restore(checkpoints, self.model, state)
        logs = Logs(self.folder, state.curve, self.accelerator.is_main_process)
        steps = iter(track(range(state.step, self.fitting.steps), partial(self._label, state)))
        next(steps, None)

        def after(state: State) -> None:
            new = logs.write(state.curve)
            if self._due(state, new):
                state.sums = self.accelerator.reduce(state.sums, "mean")  # equal in all processes, as after a restart
                if self.accelerator.is_main_process:
                    checkpoint.save(checkpoints, self.model, state)
                self.accelerator.wait_for_everyone()
            next(steps, None)

        more: dict[str, Any] = dict(evaluate=self.evaluate, on_step=after, state=state)
        try:
            fit(self.model, self.batches, self.fitting, self.source.loss, **more)
        except torch.OutOfMemoryError:
            raise HeadwiseError(
                f"the device has too little memory for {self.settings.micro_tokens} tokens at once; the same training "
                f"resumes with a smaller --micro-tokens, such as {self.settings.micro_tokens // 4}."
            ) from None
        finally:
            logs.close()
        return self._finish(state, resumed)

    def _label(self, state: State) -> str:
        """Loss and speed at the last point of the curve."""
        if not state.curve:
            return "training"
        last = state.curve[-1]
        speed = self.tokens_of_step * last.step / max(1e-9, last.seconds)
        return f"training, loss {last.loss:.3f}, {speed:,.0f} tokens/s"

    def _due(self, state: State, at_point: bool) -> bool:
        """Whether it is time for a checkpoint; by the clock, the main process decides for all."""
        due = state.step % self.settings.save_every == 0 or state.step == self.fitting.steps
        if not due and at_point:
            late = float(time.monotonic() - self.saved_at > 60 * self.settings.save_minutes)
            if self.processes > 1:
                first = late if self.accelerator.is_main_process else 0.0
                late = float(self.accelerator.reduce(torch.tensor(first, device=self.device), "sum"))
            due = bool(late)
        if due:
            self.saved_at = time.monotonic()
        return due

    def _finish(self, state: State, resumed: bool) -> dict[str, Any]:
        """Write the model and then training.json, which marks the training as finished."""
        found = self._found(state, resumed)
        if self.accelerator.is_main_process:
            processor = self.source.processor() if isinstance(self.source, Images) else None
            model.save(self.model, self.stored, self.folder / "model", self.tokenizer, processor)
            write_atomically(self.folder / "training.json", json.dumps(found, indent=1) + "\n")
        self.accelerator.wait_for_everyone()
        return found

    def _found(self, state: State, resumed: bool) -> dict[str, Any]:
        """What training.json says: settings, losses with their standard errors, cost, and where it ran."""
        tokens = round(state.step * self.tokens_of_step)
        loss, error = _late(state.curve)
        device = self.device
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
        return {
            "settings": self.settings.to_json(),
            "fit": self.fitting.to_json(),
            "task": self.task,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "rows": {"train": self.source.train_rows, "evaluation": self.source.eval_rows, "step": self.rows},
            "row_tokens": self.source.row_tokens,
            "processes": self.processes,
            "resumed": resumed,
            "train_loss": loss,
            "train_loss_se": error,
            "evaluation": state.curve[-1].evaluation,
            "tokens": tokens,
            "seconds": state.seconds,
            "tokens_per_second": tokens / state.seconds,
            "flops": self._flops(tokens),
            "machine": machine,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }

    def _flops(self, tokens: int) -> float | None:
        """FLOPs of forward and backward passes (twice a forward one) over `tokens`, where the family is known."""
        config: Any = self.model.config
        try:
            shape = families.family_of(config).shape_of(config)
        except HeadwiseError:
            return None
        length = self.source.row_tokens
        per_row = cost.prefill_flops(shape, length)
        if isinstance(self.source, NextToken):  # logits for all tokens of a row, not once
            per_row += (length - 1) * 2.0 * shape.hidden_size * shape.vocab_size
        return 3.0 * per_row * tokens / length


def _late(curve: list[Point]) -> tuple[float, float]:
    """Mean loss of the last tenth of the curve, and its standard error over points."""
    losses = torch.tensor([point.loss for point in curve[-max(1, len(curve) // 10) :]], dtype=torch.float64)
    error = float(losses.std() / math.sqrt(len(losses))) if len(losses) > 1 else 0.0
    return float(losses.mean()), error


def _width(config: Any) -> int:
    for name in ("hidden_size", "n_embd", "d_model", "dim"):
        if isinstance(width := getattr(config, name, None), int):
            return width
    raise ModelError("the configuration names no hidden_size, by which the learning rate is chosen; give --rate.")


def _name_labels(config: Any, names: tuple[str, ...]) -> None:
    """Tell the configuration what its answers are called; no names: a score."""
    if not names:
        config.num_labels, config.problem_type = 1, "regression"
        return
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}


def _fit_images(config: Any, images: Images, settings: TrainSettings) -> None:
    """Refuse images that the model does not take; tell the configuration how many classes there are."""
    side = getattr(config, "image_size", images.side[0])
    wanted = (side, side) if isinstance(side, int) else tuple(side)
    if wanted != images.side or getattr(config, "num_channels", images.channels) != images.channels:
        raise ModelError(
            f"{settings.config} takes images of {wanted[0]} x {wanted[1]}, {settings.data} has {images.side[0]} x "
            f"{images.side[1]} with {images.channels} channels; set image_size, patch_size and num_channels to fit."
        )
    if config.num_labels != images.classes:
        _name_labels(config, tuple(str(number) for number in range(images.classes)))
