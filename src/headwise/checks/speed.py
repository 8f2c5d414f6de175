"""Time per token before and after, measured side by side: reading a prompt and, if the model can, decoding."""

import copy
import gc
import platform
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headwise import families
from headwise.devices import free_bytes, timed
from headwise.latency import measuring
from headwise.latency.measuring import FAST, PLAIN
from headwise.latency.stacks import as_it_came
from headwise.types import Budget, Check, Plan, Workload

FEWEST, ENOUGH = 4, 250.0  # steps that are timed at least; milliseconds that are enough for one timing


def runtime(source: nn.Module, cut: nn.Module) -> str:
    """The runtime of both models: decoders on CUDA with `optimise=True`, if joined weights fit into memory.

    A cache in bits is timed with `optimise=True` on a CPU that compiles its library, and on CUDA without it: there
    kernels are built for every layer, which takes minutes.
    """
    device: Any = source.device
    if _coded(cut):
        return FAST if measuring.compiles(source) and measuring.compiles(cut) else PLAIN
    if device.type != "cuda" or PLAIN in (measuring.runtime_of(source), measuring.runtime_of(cut)):
        return PLAIN
    gc.collect()  # models that were timed before
    joined = sum(tensor.nbytes for model in (source, cut) for tensor in model.parameters())
    return FAST if 1.2 * joined < free_bytes(device) else PLAIN


def _coded(model: nn.Module) -> bool:
    shape = families.family_of(model.config).shape_of(model.config)
    return any(layer.coded for layer in shape.layers)


@torch.no_grad()
def measure(
    source: nn.Module, cut: nn.Module, prompt: int = 256, steps: int = 16, repeats: int = 3, runtime: str = PLAIN
) -> dict[str, float]:
    """Median milliseconds per token of prefill and decode; the models take turns, so that both meet the same machine.

    Models without a cache only read: a text as a whole, or an image.
    """
    replayed = runtime == FAST and not _coded(cut)
    if runtime == FAST:
        twin = measuring.fast_twin if replayed else measuring.compiled_twin
        source, cut = twin(source), twin(cut)
    family = families.family_of(source.config)
    way = _writing if family.shape_of(source.config).cached else _reading
    first = steps if replayed else 2  # a replayed step is for one length
    warm_up = way(family, source.config, prompt, first)[0]
    for _ in range(2):  # what runs first is slow
        took = max(warm_up(model).get("decode_ms_per_token", 0.0) for model in (source, cut))
    if not replayed:
        steps = min(steps, max(FEWEST, int(ENOUGH / max(took, 1e-3))))
    run, facts = way(family, source.config, prompt, steps)
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, model in (("before", source), ("after", cut)):
            for what, ms in run(model).items():
                times.setdefault(f"{what}_{name}", []).append(ms)
    ends = {"": statistics.median, "_low": min, "_high": max}
    return {f"{key}{end}": float(of(ms)) for key, ms in times.items() for end, of in ends.items()} | facts


Run = Callable[[nn.Module], dict[str, float]]  # milliseconds of one run, by what was run


def _reading(family: families.Family, config: Any, prompt: int, steps: int) -> tuple[Run, dict[str, float]]:
    """How a model without a cache reads a text, timed per token, or an image; and how many tokens that is."""
    rows = family.example(config, 1, min(prompt, family.longest(config)))
    image = family.row_tokens(config, rows)
    what, count = ("prefill_ms_per_token", rows.shape[1]) if image is None else ("ms_per_image", 1)

    def run(model: nn.Module) -> dict[str, float]:
        here = rows.to(model.device)
        return {what: timed(lambda: model(here), model.device)[1] / count * 1e3}

    return run, {"prompt_tokens" if image is None else "tokens_per_image": float(image or count)}


def _writing(family: families.Family, config: Any, prompt: int, steps: int) -> tuple[Run, dict[str, float]]:
    """How a model reads a prompt and writes `steps` tokens, each timed per token; and how many tokens those are."""
    limit = int(getattr(config, "max_position_embeddings", None) or prompt + steps + 1)
    steps = max(1, min(steps, limit // 2))
    prompt = max(1, min(prompt, limit - steps - 1))
    rows = family.example(config, 1, prompt)
    read = family.read_tokens(rows)

    def run(model: nn.Module) -> dict[str, float]:
        given: dict[str, Any] = {"use_cache": True}
        if hasattr(model, "headwise_fast"):
            given["past_key_values"] = model.headwise_fast.cache(model, 1, prompt + steps)
        here = rows.to(model.device)
        out, prefill = timed(lambda: model(**family.first_step(here), **given), model.device)
        token = out.logits[:, -1:].argmax(-1)

        def write() -> None:
            nonlocal token
            given = {"past_key_values": out.past_key_values, "use_cache": True}
            token = model(**family.next_step(token, out), **given).logits[:, -1:].argmax(-1)

        decode = timed(write, model.device, steps)[1]
        return {"prefill_ms_per_token": prefill / read * 1e3, "decode_ms_per_token": decode / steps * 1e3}

    return run, {"prompt_tokens": float(read), "decoded_tokens": float(steps)}


def machine(device: torch.device, runtime: str = PLAIN) -> str:
    """The hardware in words, and the runtime where it is not the plain one."""
    how = ", with optimise=True" if runtime == FAST else ""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) + how
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads{how}"


SLACK = 0.05  # by which a measured time may exceed its limit: times of the same model differ by about as much


def latencies(source: nn.Module, cut: nn.Module, plan: Plan) -> tuple[dict[str, float], list[Check]]:
    """Time of source and cut under every limit on time, predicted and measured, and whether the limit is kept."""
    found: dict[str, float] = {}
    checks = []
    here = measuring.device_name(source.device)
    for budget in (b for b in plan.budgets if b.workload is not None):
        took = _took(source, cut, budget, here)
        if isinstance(took, str):
            checks.append(Check(f"measured {budget.text}", False, took, f"at most {budget.limit:.4g} ms"))
            continue
        work = budget.workload
        stem = f"{work.phase}_ms_at_{work.length}_batch_{work.batch}"
        predicted = {"after": plan.spent[budget.key]}
        if budget.table is not None:
            models = {"after": plan.target, "before": plan.source.apart}
            predicted = {end: budget.table.model_ms(model) for end, model in models.items()}
        found |= {f"{stem}_predicted_{end}": value for end, value in predicted.items()}
        found |= {f"{stem}_{end}": value for end, value in took.items()}
        checks.append(kept(budget, took, measuring.runtime_of(source)))
    return found, checks


def _took(source: nn.Module, cut: nn.Module, budget: Budget, here: str) -> dict[str, float] | str:
    """The times of both models, or why they cannot be measured on this device."""
    if budget.device != here or budget.workload is None:
        return f"planned on {budget.device}, this is {here}: verify there"
    try:
        return side_by_side(source, cut, budget.workload)
    except torch.cuda.OutOfMemoryError:
        return "source and cut do not fit side by side: use a smaller batch or length"


def kept(budget: Budget, took: dict[str, float], runtime: str) -> Check:
    """Whether a measured time keeps its limit; a percentage is of the source as measured beside it."""
    percent = re.search(r"=([0-9.]+)%", budget.text)
    limit = float(percent[1]) / 100 * took["before"] if percent else budget.limit
    seen = f"{took['after']:.4g} ms, {took['after'] / took['before']:.1%} of the source's {took['before']:.4g}"
    seen += ", both with optimise=True" if runtime == FAST else ", both as they are"
    return Check(f"measured {budget.text}", took["after"] <= limit * (1 + SLACK), seen, f"at most {limit:.4g} ms + 5%")


@torch.no_grad()
def side_by_side(source: nn.Module, cut: nn.Module, work: Workload, repeats: int = 7) -> dict[str, float]:
    """Milliseconds of both models under a workload, in the dtype that they will run in; the models take turns.

    The source is timed as it was before its heads were pooled.
    """
    family = families.family_of(source.config)
    ready = []
    for model in (as_it_came(source, family, work), cut):
        dtype = measuring.timed_dtype(model)
        model = model if dtype == model.dtype else copy.deepcopy(model).to(dtype)
        ready.append(measuring.prepare(family, model, work))
    found = measuring.in_turns(ready, source.device, repeats)
    ends = ("", "_low", "_high")
    return {
        f"{name}{end}": value
        for name, times in zip(("before", "after"), found, strict=True)
        for end, value in zip(ends, measuring.spread(times), strict=True)
    }
