"""Does the saved model have the planned sizes? Counted on the loaded model, reloaded in a fresh process."""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from headwise import budgets as prices
from headwise import families
from headwise.checks._fresh import Fresh
from headwise.cost import kv_bytes_per_token, parameters, weight_bytes
from headwise.errors import OutputError, PlanError
from headwise.files import tensors
from headwise.runtime import foreign_code
from headwise.runtime.modeling_headwise import TailoredAttention
from headwise.types import Budget, Check, LayerShape, ModelShape, Plan
from headwise.types.codes import COUNTED_TOKENS, kept_beside

PROOF_TOKENS = 64
FORMATS = ("float32", "bfloat16", "float16")  # that a model is proven in
RELOADS = "reloads in a fresh process without headwise"
TOLERANCE = 1e-4  # relative: the same stored weights, computed in float32 both times, whatever their dtype
ROUNDED = 3e-2  # the same where a large model is computed in its own format both times
NEARLY = 0.99  # of the planned bytes of weights
LEAST = 1e-30  # of answers, by which differences are divided: where all are zero, equal ones are equal
LARGE = 500_000_000  # numbers: a larger model is not loaded in float32 to be proven
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@torch.no_grad()
def write_proof(model: nn.Module, ids: torch.Tensor, path: Path) -> None:
    """Store the model's answer to a few tokens, to be compared with the reloaded model's answer.

    That is its logits, or the last stream of a model without a head. The class that loads it is stored too. Of a model
    whose cache is coded it is the answer without codes: on another machine a number may lie across the edge of a step.
    The answer is in float32, and `model` with it, unless it is large.
    """
    family = families.family_of(model.config)
    if sum(parameter.numel() for parameter in model.parameters()) <= LARGE:
        model.float()
    ids = family.excerpt(family.unpadded(ids), PROOF_TOKENS)
    with uncoded(model):
        found = family.call(model, ids.to(model.device))
    logits = found["logits"] if "logits" in found else found[0]
    how = str(next(model.parameters()).dtype).removeprefix("torch."), model.device.type
    save_proof({**family.arguments(ids), "logits": logits.float()}, path, families.auto_class_of(model), *how)


@contextmanager
def uncoded(model: nn.Module) -> Iterator[None]:
    """Keys and values as they are, within a block."""
    coders = {part: part.coders for part in model.modules() if isinstance(part, TailoredAttention)}
    try:
        for part in coders:
            part.coders = None
        yield
    finally:
        for part, coder in coders.items():
            part.coders = coder


def save_proof(
    given: dict[str, torch.Tensor], path: Path, auto: str, dtype: str = "float32", device: str = "cpu"
) -> None:
    """Store a model's inputs and its `logits`; `auto` names the class that loads it. Float32 is computed on the CPU."""
    how = f"{auto} {dtype} {'cpu' if dtype == 'float32' else device}"
    noted = {"how": how}  # one word: safetensors writes several in a random order, and equal runs have equal bytes
    save_file({name: tensor.cpu().contiguous() for name, tensor in given.items()}, path, metadata=noted)


def reload_check(folder: Path, proof: Path, portable: bool) -> Check:
    """Load the folder in a new process, without headwise, and compare logits with those before saving.

    Temporary files lie beside the model, because a full temporary folder is not the model's failure. Where there is no
    room, that is an error, not a verdict.
    """
    if not portable and (foreign := foreign_code(folder)):  # it would be run with trust
        return Check(RELOADS, False, f"{folder.name}/{foreign} is not the file Headwise wrote; it was not run", "loads")
    how, before = _read_proof(proof)
    try:
        with Fresh.of(folder.parent) as fresh:
            return _reloaded(fresh, folder, proof, portable, how, before)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"the reload check needs room in {folder.parent} ({reason}); free some space, then: headwise verify "
            f"{folder.parent}"
        ) from None


def _reloaded(
    fresh: Fresh, folder: Path, proof: Path, portable: bool, how: tuple[str, str, str], before: torch.Tensor
) -> Check:
    if how[2] == "cuda":
        torch.cuda.empty_cache()  # the other process needs room on the device
    out = Path(fresh.scratch.name) / "logits.safetensors"
    asked = [str(folder), str(proof), str(out), "no" if portable else "yes", *how]
    errors = fresh.process.communicate(json.dumps(asked) + "\n")[1]
    if fresh.process.returncode:
        reason = (errors.strip().splitlines() or ["no message"])[-1]
        if any(os.strerror(code) in errors for code in NO_ROOM):
            raise OSError(reason)
        return Check(RELOADS, False, reason[:200], "loads")
    after = tensors.read(out)["logits"]
    if after.shape != before.shape:
        return Check(RELOADS, False, "answers of another size", "the same")
    error = float((after - before).abs().max() / before.abs().max().clamp_min(LEAST))
    most = TOLERANCE if how[1] == "float32" else ROUNDED
    return Check(RELOADS, error <= most, f"relative difference {error:.1e}", f"at most {most:.0e}")


def _read_proof(proof: Path) -> tuple[tuple[str, str, str], torch.Tensor]:
    """The class that loads the model, format and device that it is computed in; its logits before it was saved."""
    advice = "run headwise heal again"
    noted = tensors.metadata(proof, advice=advice)
    auto, dtype, device = [*noted.get("how", "").split(" "), "", "", ""][:3]
    logits = tensors.read(proof, advice=advice).get("logits")
    known = auto in families.TASKS.values() and dtype in FORMATS and device in ("cpu", "cuda")
    if not known or logits is None or not logits.is_floating_point():
        raise PlanError(f"{proof} does not hold the answer of a model; {advice}.")
    return (auto, dtype, device), logits


def cache_bytes_per_token(model: nn.Module, element_bytes: int) -> int:
    """Bytes that the model keeps in its cache per token: of rows of bytes as they are, of numbers times those of one.

    First and newest tokens that are kept beside codes are spread over a text of `COUNTED_TOKENS`; they are counted in
    layers with a window too, which keep none. An encoder-decoder keeps numbers for a token of the input and for one of
    the output.
    """
    found, rows = _cached(model, element_bytes)
    return found + sum(count * -(-kept_beside(*row, element_bytes) // COUNTED_TOKENS) for count, row in rows)


def cache_bytes(model: nn.Module, element_bytes: int, tokens: int) -> int:
    """Bytes that the model keeps in its cache for a whole text of so many tokens."""
    found, rows = _cached(model, element_bytes)
    return found * tokens + sum(count * kept_beside(*row, element_bytes) for count, row in rows)


@torch.no_grad()
def _cached(model: nn.Module, element_bytes: int) -> tuple[int, list[tuple[int, tuple[int, int]]]]:
    """Bytes of a token's rows in a real cache; and of rows beside which tokens are kept: how many there are, and their
    numbers and the bytes of a near token."""
    family = families.family_of(model.config)
    if not family.shape_of(model.config).cached:
        return 0, []
    inputs = family.arguments(family.example(model.config, 1, 2).to(model.device))
    cache = model(**inputs, use_cache=True).past_key_values
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in (parts if parts[0] is not None else [cache]) for layer in part.layers]
    kept = [tensor for layer in layers if layer.keys is not None for tensor in (layer.keys, layer.values)]
    found = sum(t.numel() // t.shape[-2] * (1 if t.dtype == torch.uint8 else element_bytes) for t in kept)
    coded = [block.attention for block in family.blocks(model) if block.attention.coders is not None]
    rows = [(attention.kv_heads, (coder.size, coder.fine.bytes)) for attention in coded for coder in attention.coders]
    return found, rows


def stored_bytes(folder: Path) -> int:
    """Bytes of all tensors in the files of a model."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(entry.bytes for file in files for entry in tensors.header(file).values())


def weight_sizes(folder: Path, plan: Plan) -> dict[str, int]:
    """Bytes of weights, where a plan limits them: the source's at 16 bits per number, the model's own in its files."""
    if not any(map(prices.of_weights, plan.budgets)):
        return {}
    return {"weight_bytes_before": weight_bytes(plan.source), "weight_bytes_after": stored_bytes(folder)}


def counted_sizes(model: nn.Module) -> dict[str, int]:
    """Parameters, and cache bytes of a token where the model keeps a cache."""
    found, shape = sum(p.numel() for p in model.parameters()), families.family_of(model.config).shape_of(model.config)
    cache = {"kv_bytes_per_token": cache_bytes_per_token(model, shape.cache_bytes)} if shape.cached else {}
    return {"parameters": found, **cache}


def sizes(counted: Mapping[str, int], source: ModelShape) -> dict[str, int]:
    """Counted sizes beside the source's by formula."""
    before = {"parameters": parameters(source), "kv_bytes_per_token": kv_bytes_per_token(source)}
    both = {"before": before, "after": counted}
    return {f"{name}_{end}": found[name] for name in counted for end, found in both.items()}


def counted_shape(model: nn.Module) -> ModelShape:
    """The shape of a tailored model by its tensors, whatever its configuration says."""
    family = families.family_of(model.config)
    said = family.shape_of(model.config)
    return said.with_layers(tuple(map(_counted_layer, said.layers, family.blocks(model))))


def _counted_layer(said: LayerShape, block: families.Block) -> LayerShape:
    tensors = {"down": None if block.down is None else block.down.weight}
    if said.query_heads:
        attention = block.attention
        tensors |= {name: getattr(attention, f"{name}_proj").weight for name in "qkv"} | {"o": block.output.weight}
        tensors["k_down"] = getattr(attention, "k_down_GWK", None)
    return layer_of(said, {name: tensor.shape for name, tensor in tensors.items() if tensor is not None})


def layer_of(said: LayerShape, shapes: Mapping[str, Sequence[int]]) -> LayerShape:
    """A layer with the sizes of its tensors, by our names; only the number of heads is taken from the configuration."""
    width = {"mlp_width": shapes["down"][1] if "down" in shapes else 0}
    if not said.query_heads:
        return replace(said, **width)
    keys, values = shapes["k"][0] // said.kv_heads, shapes["v"][0] // said.kv_heads
    pooled = {"v_width": shapes["o"][1] // said.query_heads * said.pooled} if said.pooled > 1 else {}
    heads = shapes["q"][0] // (keys // said.pooled)
    seen = shapes["k_down"][2] if "k_down" in shapes else keys
    return replace(said, query_heads=heads, qk_width=keys, qk_dim=seen, v_dim=values, **width, **pooled)


def count_checks(model: nn.Module, plan: Plan, source: ModelShape, stored: int = 0) -> list[Check]:
    """Parameters and cache of the real object against the plan's, and every budget against the real object.

    `stored` are the bytes of its files, where the plan limits them.
    """
    counted, shape = counted_sizes(model), counted_shape(model)
    for budget in plan.budgets:
        if prices.of_weights(budget):
            cache = cache_bytes(model, shape.cache_bytes, budget.length) if prices.of_cache(budget) else 0
            counted[budget.name] = stored + budget.batch * cache
            counted["weights"] = stored
    return [*plan_checks(counted, plan, source), *budget_checks(plan.budgets, shape, counted)]


def plan_checks(counted: dict[str, int], plan: Plan, source: ModelShape) -> list[Check]:
    """Whether the plan is for this source, and whether the counted sizes are the planned ones."""
    found = [equal("parameters as planned", counted["parameters"], parameters(plan.target))]
    if "kv_bytes_per_token" in counted:
        cached, planned = counted["kv_bytes_per_token"], kv_bytes_per_token(plan.target)
        found.append(equal("cache bytes per token as planned", cached, planned))
    if "weights" in counted:  # a plan counts indices that not every layer stores
        stored, most = counted["weights"], weight_bytes(plan.target)
        alike = NEARLY * most <= stored <= most
        found.append(
            Check("weight bytes as planned", alike, f"{stored:,}", f"{most:,}, or up to {1 - NEARLY:.0%} less")
        )
    if replace(plan.source, grain=source.grain) != source:  # sizes are what is compared, not which are legal
        found.append(Check("plan made for this model", False, "its source has other sizes", "the source's sizes"))
    return found


def priced_again(plan: Plan, source: ModelShape) -> Plan:
    """The plan with its limits parsed again from the user's text: numbers in a plan's file may have been edited."""
    tables = [budget.table for budget in plan.budgets if budget.table is not None]
    known = [prices.parse(b.text, source, tables) if b.workload is None or b.table else b for b in plan.budgets]
    return replace(plan, budgets=tuple(known))


def budget_checks(budgets: Sequence[Budget], shape: ModelShape, counted: dict[str, int]) -> list[Check]:
    """Whether every budget is met by the model as counted; FLOPs and times follow from the sizes of its tensors.

    A limit on time without its table cannot be predicted; `speed` measures it in any case.
    """
    found = []
    for budget in (b for b in budgets if b.workload is None or b.table is not None):
        exact = {"kv": "kv_bytes_per_token", "params": "parameters"}.get(budget.name, budget.name)
        exact = exact if exact in counted else ""
        spent = counted[exact] if exact else prices.price(budget, shape)
        observed = f"{_said(spent)} {budget.unit}" + (" predicted" if budget.workload else "")
        met = spent <= budget.limit * (1 + 1e-9)
        found.append(Check(f"budget {budget.text}", met, observed, f"at most {_said(budget.limit)}"))
    return found


def _said(amount: float) -> str:
    """Whole numbers; small amounts with four digits."""
    return f"{amount:,.0f}" if amount >= 1000 or amount == int(amount) else f"{amount:.4g}"


def equal(name: str, observed: int, expected: int) -> Check:
    """A count against what was planned."""
    return Check(name, observed == expected, f"{observed:,}", f"{expected:,}")
