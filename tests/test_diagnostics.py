"""What the layers do, measured: softmax saturation, spectra and lags, against plain computations on stock models."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise import pipeline
from headwise.budgets import parse
from headwise.families.llama import FAMILY as llama
from headwise.probes import conditioning, gram, lags, saturation, spectrum
from headwise.runs.settings import Settings
from headwise.strategies import allocate
from headwise.types import Readings

SHARING = {"shared keys": 2, "own keys": 4}  # key/value heads of the four query heads


def sharp(kv_heads: int = 2, **changes):
    """A tiny stock model, eager, whose heads have something to look at: random queries would be all but flat."""
    model = llama.tiny(num_key_value_heads=kv_heads, attn_implementation="eager", **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 8
            layer.self_attn.k_proj.weight *= 8
    return model


def text(rows: int = 5, length: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def attentions(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Softmax weights (B, H, T, T) per layer, as the stock model gives them."""
    with torch.no_grad():
        return [p.double() for p in model(tokens, output_attentions=True, use_cache=False).attentions]


def dense_norm(p: torch.Tensor) -> float:
    """The largest eigenvalue of the Jacobian, formed."""
    return float(torch.linalg.eigvalsh(torch.diag(p) - torch.outer(p, p))[-1])


def by_kind(readings) -> dict:
    return {reading.kind: reading for reading in readings}


def projected():
    """A tailored model whose queries and keys are half as wide as they were; the softmax keeps its scale."""
    stock = sharp()
    layers = tuple(replace(layer, qk_dim=8) for layer in llama.shape_of(stock.config).layers)
    downs = {
        f"model.layers.{i}.self_attn.{name}_down_GWK": torch.randn(2, 16, 8) / 4 for i in range(3) for name in "qk"
    }
    return llama.build(stock, layers, {**llama.state_of(stock), **downs})


@pytest.mark.parametrize("make", [lambda: sharp(2), lambda: sharp(4), projected], ids=[*SHARING, "projected"])
def test_norms_are_those_of_the_models_own_weights(make):
    model, tokens, lengths = make(), text(3, 32), (4, 8, 16, 32)
    found = by_kind(saturation.measure(llama, llama.tailor(model), tokens, seed=0))

    def values(kind: str) -> tuple[float, ...]:
        return found[f"saturation.{kind}"].values[layer]

    for layer, p_BHTT in enumerate(attentions(model, tokens)):
        rows = [p_BHTT[:, :, t - 1, :t] for t in lengths]
        logs = np.array([[[math.log(dense_norm(p)) for p in heads] for heads in row] for row in rows])  # L B H
        assert found["saturation.jacobian_norm"].ticks[layer] == lengths
        assert values("jacobian_norm") == pytest.approx(np.exp(logs.mean((1, 2))), rel=1e-3)
        slopes = np.polyfit(np.log(lengths), logs.mean(1), 1)[0]
        assert values("slope") == pytest.approx(slopes, abs=1e-3), "heads in their order"
        assert values("largest_weight") == pytest.approx([row.amax(-1).mean().item() for row in rows], rel=1e-3)
        ranges = [(row.log().amax(-1) - row.log().amin(-1)).mean().item() / 2 for row in rows]
        assert values("logit_growth") == pytest.approx(ranges, rel=1e-3), "log weights are logits, shifted"


def test_even_attention_saturates_as_one_over_length():
    stock = llama.tiny()
    with torch.no_grad():
        for layer in stock.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = by_kind(saturation.measure(llama, llama.tailor(stock), text(2, 64), seed=0))
    norms, slope = found["saturation.jacobian_norm"], found["saturation.slope"]
    for layer in range(3):
        assert norms.values[layer] == pytest.approx([1 / t for t in norms.ticks[layer]]), "no choice is left but 1/L"
        assert slope.values[layer] == pytest.approx([-1.0] * 4, abs=1e-6)
    assert found["saturation.logit_growth"].values[0] == pytest.approx([0.0] * 5, abs=1e-12)


def test_a_head_on_one_token_has_a_finite_slope():
    q, k = torch.full((2, 1, 64, 4), 1e4), torch.zeros(2, 1, 64, 4)
    k[:, :, 0] = 1e4
    rows = saturation.norms_at(q, k, 1.0, (4, 8, 16))
    assert np.isfinite(saturation.slopes((4, 8, 16), rows.norm)).all() and rows.largest.min() == 1


def test_a_window_hides_older_keys():
    windowed, tokens = llama.tiny("mistral", sliding_window=8, attn_implementation="eager"), text(2, 32)
    windowed.load_state_dict(sharp().state_dict())
    found = by_kind(saturation.measure(llama, llama.tailor(windowed), tokens, seed=0))
    p = attentions(windowed, tokens)[1]
    expected = math.exp(np.mean([[math.log(dense_norm(p[b, h, 31, 24:])) for h in range(4)] for b in range(2)]))
    assert float(p[:, :, 31, :24].abs().max()) == 0
    assert found["saturation.jacobian_norm"].at(1, 32) == pytest.approx(expected, rel=1e-3)
    (lag,) = lags.measure(llama, llama.tailor(windowed), tokens, 0)
    assert lag.values[1][8:] == pytest.approx([0.0] * 24)


def naive_lags(stock, tokens: torch.Tensor, layer: int) -> list[float]:
    """Vectors of hidden size for every pair of positions, added up."""
    attention, values = stock.model.layers[layer].self_attn, []
    hook = attention.v_proj.register_forward_hook(lambda _m, _a, out: values.append(out.double()))
    p_BHTT = attentions(stock, tokens)[layer]
    hook.remove()
    rows, length = tokens.shape
    heads = p_BHTT.shape[1]
    v = values[0].view(rows, length, -1, 16).repeat_interleave(heads // (values[0].shape[-1] // 16), dim=2)
    o = attention.o_proj.weight.detach().double().view(-1, heads, 16)
    total = torch.zeros(length, dtype=torch.float64)
    for b in range(rows):
        for t in range(length // 2, length):
            for m in range(t + 1):
                given = sum(p_BHTT[b, h, t, t - m] * (o[:, h] @ v[b, t - m, h]) for h in range(heads))
                total[m] += given.square().sum()
    root = total.sqrt()
    return (root / root.sum()).tolist()


@pytest.mark.parametrize("kv_heads", SHARING.values(), ids=SHARING.keys())
def test_lags_are_those_of_the_vectors_added_up(kv_heads):
    stock, tokens = sharp(kv_heads), text(2, 12)
    (reading,) = lags.measure(llama, llama.tailor(stock), tokens, seed=0)
    assert reading.kind == "lags.contribution" and reading.ticks[0] == tuple(range(12))
    for layer in range(3):
        assert reading.values[layer] == pytest.approx(naive_lags(stock, tokens, layer), rel=1e-3)
        assert sum(reading.values[layer]) == pytest.approx(1), "of a short block, all lags are there"


def test_long_blocks_leave_a_tail():
    (reading,) = lags.measure(llama, llama.tailor(sharp()), text(3, 128), seed=0)
    assert reading.ticks[0] == tuple(range(64)) and all(0 < sum(row) < 1 for row in reading.values)
    assert reading.standard_error is not None and all(e > 0 for e in reading.standard_error[1])


def test_standard_errors_are_of_the_sequences_not_of_their_order():
    model, tokens = llama.tailor(sharp()), text(6, 32)
    for probe in (saturation, lags):
        forward, backward = (probe.measure(llama, model, rows, 0) for rows in (tokens, tokens.flip(0)))
        for one, other in zip(forward, backward, strict=True):
            assert one.values[2] == pytest.approx(other.values[2])
            assert one.standard_error[2] == pytest.approx(other.standard_error[2])
        same = probe.measure(llama, model, tokens[:1].repeat(4, 1), 0)
        assert all(max(reading.standard_error[0]) < 1e-6 for reading in same), "equal sequences do not differ"


def test_effective_rank_counts_directions():
    ranks = spectrum.effective_rank(torch.tensor([[3.0, 0, 0, 0], [2, 2, 2, 2], [5, 5, 0, 0]]))
    assert ranks.tolist() == pytest.approx([1, 4, 2])
    assert spectrum.energy_lost(torch.tensor([2.0, 1, 1]), 1).item() == pytest.approx(1 / 3)


def test_one_direction_has_rank_one():
    q, k = torch.randn(1, 8, 1).double(), torch.randn(1, 8, 1).double()
    z, o = torch.randn(2, 6, 1).double(), torch.randn(5, 12)
    moment = {"gram_q": q @ q.mT, "gram_k": k @ k.mT, "gram_z": z @ z.mT}
    assert spectrum.effective_rank(spectrum.of_logits(moment)).tolist() == pytest.approx([1], abs=1e-3)
    own = spectrum.of_outputs(moment, o, kv_heads=2)
    assert spectrum.effective_rank(own).tolist() == pytest.approx([1, 1], abs=1e-3)
    shared = spectrum.of_outputs(moment, o, kv_heads=1)
    assert 1.1 < spectrum.effective_rank(shared).item() < 2.1, "two heads that share values use both directions"


@pytest.mark.parametrize("kv_heads", SHARING.values(), ids=SHARING.keys())
def test_spectra_are_those_of_the_activations(kv_heads):
    model, tokens = llama.tailor(sharp(kv_heads)), text(4, 48)
    batches = []
    block = llama.blocks(model)[1]
    hook = block.attention.attend.register_forward_hook(
        lambda _m, args, out: batches.append({"q": args[0], "k": args[1], "z": out[0]})
    )
    moments = gram.collect(llama, model, tokens, mlp=False)
    hook.remove()
    seen = {name: torch.cat([batch[name] for batch in batches]) for name in "qkz"}
    found = by_kind(spectrum.measure(llama, model, moments, tokens.numel(), 0))
    assert found["spectrum.logit_rank"].ticks[1] == tuple(range(kv_heads))
    assert found["spectrum.logit_energy_lost"].ticks[1] == (16, 14, 12, 10, 8, 6, 4, 2)
    for group in range(kv_heads):
        q = seen["q"].unflatten(1, (kv_heads, -1))[:, group].flatten(0, 2).double()
        k = (seen["k"] - seen["k"].mean(2, keepdim=True))[:, group].flatten(0, 1).double()
        logits = torch.linalg.svdvals(q @ k.mT)
        expected = torch.special.entr(logits.square() / logits.square().sum()).sum().exp().item()
        assert found["spectrum.logit_rank"].values[1][group] == pytest.approx(expected, rel=1e-3)
        if kv_heads == 4:  # own values: the spectrum of what the head adds to the stream
            w = block.attention.o_proj.weight.detach().view(-1, 4, 16)[:, group].double()
            added = torch.linalg.svdvals(seen["z"][:, :, group].flatten(0, 1).double() @ w.mT)
            expected = torch.special.entr(added.square() / added.square().sum()).sum().exp().item()
            assert found["spectrum.output_rank"].values[1][group] == pytest.approx(expected, rel=1e-3)
    for kind in ("spectrum.logit_energy_lost", "spectrum.output_energy_lost"):
        row = found[kind].values[1]
        assert row[0] == 0 and all(a <= b for a, b in zip(row, row[1:], strict=False)) and row[-1] < 1


KINDS = {
    "saturation.jacobian_norm", "saturation.slope", "saturation.logit_growth", "saturation.largest_weight",
    "spectrum.logit_rank", "spectrum.output_rank", "spectrum.logit_energy_lost", "spectrum.output_energy_lost",
    "lags.contribution",
}  # fmt: skip


def bench_of(stock, length: int = 64) -> tuple[Settings, pipeline.Source]:
    model = llama.tailor(stock)
    settings = Settings("tiny", ("kv=75%", "params=99%"), swap_tokens=128, heal="none", device="cpu", length=length)
    rows = text(12, length)
    return settings, pipeline.InMemory(llama, model, None, rows, rows[:2], rows[:2], "random tokens")


@pytest.fixture(scope="module", params=SHARING.values(), ids=SHARING.keys())
def probed(request) -> Readings:
    settings, bench = bench_of(sharp(request.param))
    return pipeline.probe(settings, bench)[0]


def test_probing_measures_what_the_layers_do(probed, tmp_path):
    found, shape = by_kind(probed.curves), probed.source
    assert set(found) >= KINDS
    sizes = {"query_head": "query_heads", "kv_head": "kv_heads"}
    for kind in KINDS:
        reading = found[kind]
        assert len(reading.values) == 3 and reading.meaning.endswith(".") and reading.tokens > 0
        assert all(math.isfinite(v) for row in (*reading.values, *(reading.standard_error or ())) for v in row)
        if reading.axis in sizes:
            per_layer = [getattr(layer, sizes[reading.axis]) for layer in shape.layers]
            assert reading.ticks == tuple(tuple(range(count)) for count in per_layer)
    assert found["saturation.jacobian_norm"].ticks[0] == (4, 8, 16, 32, 64)
    assert found["lags.contribution"].ticks[0] == tuple(range(64))
    probed.save(tmp_path / "readings.json")
    assert Readings.read(tmp_path / "readings.json") == probed


def test_plans_do_not_depend_on_diagnostics(probed):
    shape = probed.source
    budgets = (parse("kv=75%", shape),)
    old = replace(probed, curves=tuple(r for r in probed.curves if r.kind.startswith("damage.")))
    assert len(old.curves) < len(probed.curves)
    assert allocate(old, budgets) == allocate(probed, budgets), "and readings from before they existed still work"


def test_later_rounds_are_not_diagnosed_again():
    settings, bench = bench_of(sharp(), 32)
    readings = pipeline.probe(settings, bench, diagnose=False)[0]
    assert all(r.kind.startswith("damage.") for r in readings.curves)


def test_blocks_too_short_for_a_slope_give_none():
    assert saturation.measure(llama, llama.tailor(sharp()), text(3, 7), 0) == []
    (reading,) = lags.measure(llama, llama.tailor(sharp()), text(1, 3), 0)
    assert reading.ticks[0] == (0, 1, 2) and sum(reading.values[0]) == pytest.approx(1)


class TestConditioning:
    """Condition numbers of head outputs."""

    @pytest.fixture(params=["llama", "gpt2", "bert"])
    def found(self, request):
        from headwise import families
        from headwise.registry import find

        family = find("headwise.families", request.param).FAMILY
        families.known()
        model = family.tailor(family.tiny(family.model_types[0]))
        return family, model, family.example(model.config, 3, 12)

    def test_outputs_are_what_the_output_projection_reads(self, found):
        family, model, rows = found
        seen = []
        hooks = [
            block.output.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
            for block in family.blocks(model)
        ]
        family.run(model, rows)
        for hook in hooks:
            hook.remove()
        reading = conditioning.measure(family, model, rows, 0)[0]
        for layer, z in enumerate(seen):
            wanted = [float(torch.linalg.cond(part[:8].double())) for part in z.detach()]
            assert reading.at(layer, 8) == pytest.approx(float(np.exp(np.log(wanted).mean())), rel=1e-3)
