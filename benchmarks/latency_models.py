"""The models of `benchmarks/latency.py`: the embedded one, probed; and a random one whose damages are invented."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from headwise import families, pipeline
from headwise.cuts import reshape
from headwise.latency.stacks import Stacks
from headwise.probes import fisher
from headwise.runs.settings import Settings
from headwise.types import ModelShape, Plan, Reading, Readings, Workload

SIZES = ("qk", "v", "mlp")
CASES = {  # what may be cut, and how many heads share a row
    "each": ((*SIZES, "depth"), 1),
    "pooled": ((*SIZES, "depth"), 8),
    "coded": (("mlp", "bits", "depth"), 8),
}
STEPS = {1: (16, 1024), 8: (192, 2048)}  # of rows and of MLPs, by heads to a row
LAYERS = 0.3  # what a whole layer's removal costs
CODES = (8, 6, 4, 3, 2, 1)  # mean bits of the codes that are offered: kernels are built for each
SPREAD = 1e4  # of the prices of a row's coefficients
LLAMA_1B = dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
TINY = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8,
    head_dim=8, vocab_size=128,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What is timed, what a probing found, what may be cut, and how a plan is carried out."""

    family: Any
    source: Any
    readings: Readings
    allow: tuple[str, ...]
    build: Callable[[Plan], Any]


def embedded() -> Model:
    """The embedded model, after a short probing."""
    settings = Settings(model="embedded", tokens=4096, eval_tokens=1024, swap_tokens=0, allow=SIZES, device="cpu")
    bench = pipeline.load_source(settings)
    readings, moments = pipeline.probe(settings, bench, diagnose=False)

    def build(plan: Plan) -> Any:
        return reshape(bench.family, bench.model, plan, moments)

    return Model(bench.family, bench.model, readings, SIZES, build)


def stock(device: str, tiny: bool = False) -> Any:
    """A random model of Llama 3.2 1B's shape in bf16, or a tiny one."""
    config = transformers.LlamaConfig(**{**LLAMA_1B, **(TINY if tiny else {})})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model.eval()


def invented_model(random_model: Any, case: str, tiny: bool = False) -> Model:
    """A random model for one of CASES, with invented damages: steep at small sizes, layers of different worth."""
    allow, pooled = CASES[case]
    family = families.family_of(random_model.config)
    source = family.tailor(random_model, pooled)
    shape = family.shape_of(source.config)
    step, wide = STEPS[pooled] if not tiny else (pooled * 4, 32)
    shape = replace(shape, grain=replace(shape.grain, qk_step=step, v_step=step, mlp_step=wide))

    def build(plan: Plan) -> Any:
        return Stacks(family, source, Workload()).model(plan.target.layers)

    return Model(family, source, invented(shape, "bits" in allow), allow, build)


def invented(shape: ModelShape, coded: bool, seed: int = 0) -> Readings:
    """Curves of the kind that probes find."""
    draw, layer, grain, count = random.Random(seed), shape.layers[0], shape.grain, len(shape.layers)
    sizes = {
        "qk_projected": (1e-3, grain.qk_sizes(layer.qk_dim)),
        "v": (3e-3, grain.v_sizes(layer.v_dim)),
        "mlp": (1e-2, grain.mlp_sizes(layer.mlp_width)),
    }
    order: dict[str, Any] = {"mlp": (tuple(range(layer.mlp_width)),)}
    if grain.rotary:
        sizes["qk_pairs"] = (3e-3, grain.qk_sizes(layer.qk_dim))
        order["qk_pairs"] = (tuple(range(layer.qk_width // 2)),) * layer.kv_heads
    curves = []
    for kind, (scale, ticks) in sizes.items():
        worth = [scale * 10 ** draw.gauss(0.0, 0.4) for _ in range(count)]
        curves.append(_curve(kind, ticks, [[w * ((ticks[0] / tick) ** 1.5 - 1) for tick in ticks] for w in worth]))
    if coded:
        for name, size in (("k_bits", layer.qk_dim), ("v_bits", layer.v_dim)):
            codes = _codes(size)
            damages = [0.0, *(damage for _, damage in codes.values())]
            worth = [10 ** draw.gauss(0.0, 0.4) for _ in range(count)]
            curves.append(_curve(name, (2 * size, *codes), [[w * damage for damage in damages] for w in worth]))
            order[name] = tuple(code for code, _ in codes.values())
    gone = draw.sample(range(count), count // 2)
    steps = range(len(gone) + 1)
    curves.append(_curve("depth", steps, [[LAYERS * step**1.5 for step in steps]]))
    return Readings("random", shape, tuple(curves), (order,) * count, tokens=0, seed=seed, depth=tuple(gone))


def _codes(size: int) -> dict[int, tuple[tuple[int, ...], float]]:
    """Codes as a probing makes them of prices that fall evenly, by their bytes; all layers are offered the same."""
    prices = torch.logspace(0, -torch.tensor(SPREAD).log10().item(), size, dtype=torch.float64) / size
    moments = {f"{name}_{what}": x for name in "kv" for what, x in (("price", prices[None]), ("near", prices.sum()))}
    costs = fisher.Costs.of(moments, "k")
    levels = fisher._levels([costs.prices])
    wanted = [level for mean, level in zip(fisher.MEAN_BITS, levels, strict=True) if float(mean) in CODES]
    return {taken: found for taken, found in fisher._offered(costs, wanted).items() if sum(found[0]) > 1}


def _curve(kind: str, ticks: Sequence[int], rows: Sequence[Sequence[float]]) -> Reading:
    values, every = tuple(map(tuple, rows)), (tuple(ticks),) * len(rows)
    return Reading(
        "invented", f"damage.{kind}", kind, every, values, None, "nats per token", "Invented.", tokens=0, seed=0
    )
