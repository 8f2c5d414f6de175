"""The training loop, its checkpoints, and what random models begin with."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from test_train import LLAMA, tailored
from torch import nn

from headwise import families
from headwise.errors import HeadwiseError
from headwise.research.train.settings import parts_of_step, usual_rate
from headwise.runtime.modeling_headwise import TailoredAttention
from headwise.training import checkpoint
from headwise.training.loop import FitSettings, begin, fit, next_token, optimiser_for, pace
from headwise.training.order import Order


def right_class(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy on inputs and labels."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def toy() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2)), x, (x[:, 0] > 0).long()


def test_fit_trains_any_module_and_tells_how():
    model, x, y = toy()
    order, seen = Order(64, 16), []
    curve = fit(
        model,
        lambda step: (x[order(step)], y[order(step)]),
        FitSettings(steps=60, rate=3e-2, point_every=20, evaluate_every=30),
        right_class,
        evaluate=lambda m: {"loss": float(right_class(m, (x, y))), "training": float(m.training)},
        on_step=lambda state: seen.append(state.step),
    )
    assert [point.step for point in curve] == [20, 30, 40, 60] and seen == list(range(1, 61))
    assert curve[-1].loss < curve[0].loss / 3
    assert [point.evaluation is not None for point in curve] == [False, True, False, True]
    assert curve[-1].evaluation["loss"] < 0.2 and curve[-1].evaluation["training"] == 0, "evaluated without dropout"


def test_accumulated_parts_are_one_large_step():
    def trained(accumulate: int) -> torch.Tensor:
        model, x, y = toy()
        model[2].p = 0.0
        size = 32 // accumulate
        rows = Order(64, size)
        settings = FitSettings(steps=3, accumulate=accumulate)
        fit(model, lambda n: (x[rows(n)], y[rows(n)]), settings, right_class)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(trained(4), trained(1), atol=1e-5, rtol=1e-4)


def test_decay_is_for_matrices_and_the_rate_rises_then_falls():
    groups = optimiser_for(toy()[0], FitSettings(steps=1, decay=0.3)).param_groups
    assert [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in groups] == [(0.3, {2}), (0.0, {1})]
    settings = FitSettings(steps=100, warm_up=0.1)
    rates = [pace(step, settings) for step in range(100)]
    assert rates.index(max(rates)) == 9 and max(rates) == 1
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_divergence_says_what_to_do():
    model, x, y = toy()
    with pytest.raises(HeadwiseError, match="diverged.*rate"):
        fit(model, lambda n: (x * math.nan, y), FitSettings(steps=1), right_class)


def test_every_row_once_per_epoch_in_an_order_of_its_own():
    order = Order(10, 4, seed=3)
    rows = torch.cat([order(step) for step in range(5)]).tolist()
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10)) and rows[:10] != rows[10:]
    assert order(1).tolist() == Order(10, 4, seed=3)(1).tolist() != Order(10, 4, seed=4)(1).tolist()


def test_steps_are_shared_evenly_or_refused():
    assert parts_of_step(rows=12, row_tokens=10, processes=2, micro_tokens=25) == 3
    with pytest.raises(HeadwiseError, match="--batch-rows 4"):
        parts_of_step(rows=5, row_tokens=10, processes=2, micro_tokens=25)
    assert usual_rate(1536, False) == 3e-4 and usual_rate(1536, True) == pytest.approx(1.5e-5)


# What a random model begins with.

KINDS = [(family, kind) for family in families.known() if not family.package for kind in family.model_types]


@pytest.mark.parametrize(("family", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_a_tailored_model_begins_as_the_stock_one(family, kind):
    tiny = family.tiny(kind)
    tailored = family.tailor(tiny)
    torch.manual_seed(0)
    stock, ours = (type(model)._from_config(model.config) for model in (tiny, tailored))
    wanted, found = family.apart(family.state_of(stock), stock.config), family.state_of(ours)
    assert set(wanted) == set(found)
    for name, tensor in wanted.items():
        a, b = tensor.double().flatten(), found[name].double().flatten()
        if len(a) < 2 or float(a.std()) == 0:
            assert torch.equal(a, b), name  # biases and norms
            continue
        noise = 5 / math.sqrt(len(a))
        assert float(b.std() / a.std()) == pytest.approx(1, abs=noise), name
        assert float(b.mean() - a.mean()) == pytest.approx(0, abs=1.5 * noise * float(a.std())), name


def test_outputs_of_a_deep_gpt2_begin_small():
    config = transformers.AutoConfig.for_model(**{**tailored("gpt2"), "n_embd": 128, "n_layer": 2, "n_head": 2})
    config.headwise["layers"] = [{**layer, "v_dim": 64, "mlp_width": 64} for layer in config.headwise["layers"]]
    model = transformers.AutoModelForCausalLM.from_config(config)
    for layer in model.transformer.h:
        for output in (layer.attn.o_proj, layer.mlp.c_proj):
            assert float(output.weight.detach().std()) == pytest.approx(0.02 / 2, rel=0.05)
        assert float(layer.attn.q_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_heads_that_rotate_less_begin_as_smaller_stock_heads():
    config = transformers.AutoConfig.for_model(**tailored("llama"))
    model = transformers.AutoModelForCausalLM.from_config(config)
    attention = model.model.layers[1].self_attn
    small = transformers.AutoConfig.for_model(**{**LLAMA, "head_dim": 4})
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    frequencies = rotary(config).inv_freq[attention.pairs_GP[0]]
    torch.testing.assert_close(frequencies, rotary(small).inv_freq)


def test_projections_of_queries_and_keys_can_be_learned():
    sizes = tailored("llama")
    sizes["headwise"]["layers"][0] |= {"qk_dim": 4}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**sizes))
    next_token(model, torch.arange(24).view(2, 12)).backward()
    down = [m.q_down_GWK for m in model.modules() if isinstance(m, TailoredAttention) and m.qk_dim < m.qk_width]
    assert len(down) == 1 and float(down[0].grad.norm()) > 0


def test_unequal_dimensions_train_alike_on_every_kernel():
    grads = {}
    for kernel in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**tailored("llama"))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel).train()
        next_token(model, torch.arange(48).view(2, 24) * 7).backward()
        grads[kernel] = model.model.layers[1].self_attn.v_proj.weight.grad
    torch.testing.assert_close(grads["sdpa"], grads["eager"], atol=1e-6, rtol=1e-4)


def test_optimiser_state_survives_a_checkpoint(tmp_path):
    model, x, y = toy()
    settings = FitSettings(steps=2)
    state = begin(model, settings)
    fit(model, lambda n: (x, y), settings, right_class, state=state)
    checkpoint.save(tmp_path, model, state)
    other = toy()[0]
    fresh = begin(other, settings)
    assert checkpoint.restore(tmp_path, other, fresh) and fresh.step == 2 and fresh.curve == state.curve
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert state.optimiser.state[a].keys() == fresh.optimiser.state[b].keys() != set()
        assert all(torch.equal(value, fresh.optimiser.state[b][key]) for key, value in state.optimiser.state[a].items())
