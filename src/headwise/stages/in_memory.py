"""A source that is held in memory, as nearly every one is: how it is probed, reshaped and healed, saved and judged."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from headwise import budgets as prices
from headwise import families, heal, processes, strategies, tasks
from headwise.checks import _fresh, certificate, exactness, quality, speed
from headwise.checks._lengths import predicted
from headwise.cost import parameters
from headwise.cuts import blind_moments, reshape
from headwise.cuts import save as save_model
from headwise.files import disk
from headwise.linalg import Rounded
from headwise.memory import fits
from headwise.progress import Track, aside, note, silently, stage
from headwise.runs.folder import RunFolder
from headwise.runs.healing import rehearsed_damage
from headwise.runs.settings import Settings
from headwise.stages import packing, words
from headwise.stages.probe import probe_in
from headwise.stages.source import (
    Fitted,
    Judged,
    Probed,
    Source,
    pooled_heads,
    refuse_other_plan,
    refuse_packed,
    refuse_units,
)
from headwise.stages.texts import read_texts
from headwise.tasks.causal import Causal
from headwise.types import Healing, Plan
from headwise.types.verdict import Sample


@dataclass(frozen=True)
class InMemory(Source):
    """A source whose model is an `nn.Module` on our modules."""

    def probe(self, settings: Settings, folder: RunFolder, track: Track = silently, diagnose: bool = True) -> Probed:
        return probe_in(folder, settings, self, track, diagnose)

    def expect_judgement(self, folder: RunFolder) -> None:
        """A CPU's cores have other work until then."""
        if self.model.device.type == "cuda" and processes.index() == 0:
            _fresh.expect_reload(folder.path)

    def fit(self, settings: Settings, probed: Probed, plan: Plan, folder: RunFolder | None, track: Track) -> Fitted:
        if any(map(prices.of_weights, plan.budgets)):
            note(words.expected(plan))
        blind = strategies.blind(plan.strategy)
        with stage(track, "reshaping"):
            moments = blind_moments(self.family, self.current) if blind else probed.moments
            model = reshape(self.family, self.current, plan, moments)
        rehearse = partial(self.rehearse, track=track)
        if settings.heal == "none":
            model, packed = self._packed(model, plan, track)
            return Fitted(model, plan, [], rehearse(model).expected_damage(), packed)
        refits = settings.heal == "refit"
        model, packed = self._packed(model, plan, track, packing.BEFORE_REFIT) if refits else (model, {})
        job = self.job(settings, model, track, None if folder is None else folder.healing)
        model, healing = heal.healed(settings.heal, job, rehearse)
        known = None if plan.target.packed else healing.rehearsed
        model, more = self._packed(model, plan, track, packing.REFITTED if refits else packing.ALL, refits)
        found = rehearse(model).expected_damage() if known is None else known
        return Fitted(model, plan, [healing], found, {**packed, **more})

    def _packed(
        self,
        model: nn.Module,
        plan: Plan,
        track: Track,
        fields: tuple[str, ...] = packing.ALL,
        balanced: bool = False,
    ) -> tuple[nn.Module, dict[str, Rounded]]:
        """The model with weights in the bits of its plan."""
        if not plan.target.packed:
            return model, {}
        count = max(1, packing.TOKENS // self.calibration.shape[1])
        rows = self.calibration[:: max(1, len(self.calibration) // count)]
        return packing.packed_model(self.reader, model, plan.target, rows, self.seed, track, fields, balanced)

    def save(self, settings: Settings, folder: RunFolder, fitted: Fitted) -> None:
        last = fitted.healings[-1] if fitted.healings else Healing("none")
        found = replace(last, rehearsed=fitted.rehearsed, rounds=tuple(fitted.healings[:-1]))
        folder.write_json(folder.heal_file, found.to_json())
        limited = any(map(prices.of_weights, fitted.plan.budgets))  # counted in 16 bits per number
        with families.quietly():
            place, _ = families.locate(settings.model)
            saved = save_model(
                self.family,
                fitted.model,
                self.tokenizer,
                folder.model,
                fitted.plan.portable,
                torch.bfloat16 if limited else families.saved_dtype(place, self.model.config),
                partial(families.accompany, settings.model, embeds=self.task.name == "embedding"),
                fitted.packed,
            )
        disk.write_file(folder.proof_file, lambda new: exactness.write_proof(saved, self.evaluation, new))
        folder.record_model(settings, ("model", "heal.json", "proof.safetensors"))
        self.clear(settings, folder)

    def compare(self, settings: Settings, folder: RunFolder, plan: Plan, track: Track = silently) -> Judged:
        model, shape, rows = self.model, self.shape, self.evaluation
        with stage(track, "loading the new model"):
            stock, _ = families.load(str(folder.model), str(model.device), dtype=model.dtype)
        cut = self.family.tailor(stock, share="all")
        refuse_other_plan(folder, plan, self.family.shape_of(cut.config))
        reloaded = aside(lambda: exactness.reload_check(folder.model, folder.proof_file, plan.portable))
        found, known = self._quality(cut, track)
        stored = exactness.weight_sizes(folder.model, plan)
        checks = exactness.count_checks(cut, plan, shape, stored.get("weight_bytes_after", 0))
        lengths = certificate.Found()
        if self.task.has_past:  # else the model reads no growing text
            asked = self.certificate_rows(settings)
            lengths = certificate.measure(self.family, model, cut, asked, self.seed, track, known)
        samples: tuple[Sample, ...] = ()
        if self.task.generates:
            with stage(track, "writing samples"):
                samples = quality.samples(model, cut, self.tokenizer, rows)
        with stage(track, "reloading in a fresh process"):
            checks.append(reloaded())
        with stage(track, "timing both models"):
            took, kept = speed.latencies(model, cut, plan)
            runtime = speed.runtime(model, cut)
            times = {**speed.measure(model, cut, runtime=runtime), **took}
        return Judged(
            quality=found,
            lengths=lengths,
            expected={"predicted": rehearsed_damage(folder.heal_file), "sum_of_prices": plan.predicted_damage},
            size={**exactness.sizes(exactness.counted_sizes(cut), shape), **stored},
            speed=times,
            checks=(*checks, *kept),
            samples=samples,
            machine=speed.machine(model.device, runtime),
        )

    def _quality(self, cut: nn.Module, track: Track) -> tuple[quality.Comparison, certificate.Known | None]:
        """How both models answer the evaluation; of a decoder also how they predict each token of it."""
        rows = self.evaluation
        if type(self.task) is Causal:
            found = predicted(self.family, (self.model, cut), rows, track, "quality")
            if not isinstance(found, str):
                return quality.of_tokens(found), (rows, found)
        return quality.compare(self.family, self.model, cut, rows, track, self.task, self.seed, self.truth), None

    def clear(self, settings: Settings, folder: RunFolder) -> None:
        for number in range(1, settings.rounds + 1):
            disk.remove(folder.round(number).healing)


def load_source(settings: Settings, track: Track = silently) -> InMemory:
    """Load the model and read the rows."""
    device = processes.begin(settings.device)
    with stage(track, "loading the model"):
        config = families.configuration(settings.model, settings.trust_remote_code, settings.task)
        dtype = families.computed_dtype(config, settings.dtype, device)
        alone = settings.device == "auto" and device == "cuda" and processes.count() == 1
        size = parameters(families.family_of(config).shape_of(config)) * dtype.itemsize
        large = alone and not fits(size, device)
        if large:  # it stays in host memory and borrows the GPUs
            dtype = families.computed_dtype(config, settings.dtype, "cpu")
        place = "cpu" if large else device
        model, tokenizer = families.load(settings.model, place, settings.trust_remote_code, settings.task, dtype)
    task, family = tasks.of(model, tokenizer, settings.model), families.family_of(model.config)
    refuse_units(settings, family)
    refuse_packed(settings, family.shape_of(model.config))
    texts = read_texts(settings, family, model.config, tokenizer, task, model, track)
    return InMemory(
        family,
        family.tailor(model, pooled_heads(settings, family, model, task), share="all"),
        tokenizer,
        *texts,
        task=task,
        context=settings.served(family.longest(model.config)),
        seed=settings.seed,
        spread=large,
    )
