"""Models larger than memory: streamed results are those of the path in memory, a kill costs one layer, errors help."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headwise import families, heal, strategies
from headwise.budgets import parse
from headwise.cuts import reshape, save
from headwise.cuts.balance import balance
from headwise.errors import ModelError
from headwise.heal import blockwise
from headwise.heal._job import Job
from headwise.heal.refit import refit
from headwise.probes import gram
from headwise.runs.heal_options import Options
from headwise.runs.moments import read_layer, read_moments, write_moments
from headwise.stream import _store, probe
from headwise.stream._checkpoint import Checkpoint
from headwise.stream._model import Streamed
from headwise.stream._store import StreamStore, read_tensors
from headwise.stream.build import StreamedBuild
from headwise.tasks.causal import Causal
from headwise.types import Healing, Plan

KINDS = {
    "llama": {},
    "llama, tied, bf16": dict(tie_word_embeddings=True, dtype=torch.bfloat16),
    "llama, no sharing": dict(num_key_value_heads=4),
    "phi3": {},  # fused weights
    "gpt2": {},  # fused and turned weights, tied, learned positions, folded projections
    "gpt_neox": {},  # a parallel MLP, interleaved heads, another name in the files
    "opt": {},
    "gemma2": {},  # sandwich norms, windows, caps
    "gemma3_text": {},  # norms of queries and keys, a buffer beside the embeddings
    "qwen2": {},
}


def made(name: str, path: Path, shard: str = "40KB"):
    """A tiny model of a kind, in a folder of several files, and the family."""
    kind, changes = name.partition(",")[0], dict(KINDS[name])
    dtype = changes.pop("dtype", torch.float32)
    family = next(f for f in families.known() if kind in f.model_types)
    model = family.tiny(kind, **changes).to(dtype)
    with families.quietly():
        model.save_pretrained(path, max_shard_size=shard)
    add_tokenizer(path)
    return family


def add_tokenizer(path: Path) -> None:
    embedded = Path(families.locate("embedded")[0])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded / file, path / file)


def in_memory(family, path: Path):
    """The same model as the path in memory has it."""
    return family.tailor(families.load(str(path))[0])


class Held:
    """A model in memory that answers the walk as a streamed one does."""

    def __init__(self, family, model) -> None:
        self.family, self.model, self.device = family, model, "cpu"
        self.layers, self.shape = family.layers(model), family.shape_of(model.config)
        self.embed = lambda ids: family.embed(model, ids)
        self.contexts = lambda parts, reader=family, dtype=None: reader.contexts(model, parts)
        self.run = lambda index, stream, context: family.run_layer(model, index, stream, context)

    def layer(self, index):
        return nullcontext(self.layers[index])


def build(source: Streamed, plan: Plan, work: Path, out: Path, tokenizer, rows, options=None, ridge=None) -> Healing:
    """Carry out a plan, healed on rows where there are any; with options, its layers are trained."""
    made = StreamedBuild(source, plan, work, rows, options=options or Options(ridge=ridge), trains=options is not None)
    found = made.run(out)
    made.finish(tokenizer, out, lambda folder: None)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_streamed_model_reads_cuts_and_heals_as_one_in_memory_does(name, tmp_path):
    family = made(name, tmp_path / "m")
    source, reference = Streamed(tmp_path / "m"), in_memory(family, tmp_path / "m")
    assert len({entry.file for entry in source.files.entries.values()}) > 1, "the checkpoint has several files"
    rows = family.example(reference.config, 6, 24)
    wanted = probe.Wanted("m", mlp=True, pairs=True, few=48)
    readings = probe.probe(source, rows, wanted, tmp_path / "w")
    held = probe.probe(Held(family, reference), rows, wanted, tmp_path / "h")  # type: ignore[arg-type]
    write_moments(tmp_path / "moments.safetensors", gram.collect(family, reference, rows, True))
    moments = read_moments(tmp_path / "moments.safetensors", "cpu", source.shape.layers)
    for index, layer in enumerate(moments):
        streamed = read_tensors(probe.moments_file(tmp_path / "w", index))
        assert all(torch.equal(streamed[key].double(), layer[key]) for key in layer), "moments are equal to the bit"

    budget = (parse("kv=75%", source.shape), parse("params=95%", source.shape))
    plan, other = (strategies.allocate(found, budget, allow=("qk", "v", "mlp")) for found in (readings, held))
    assert plan.target == other.target and plan.keep == other.keep, "the same plan"
    assert plan.predicted_damage == pytest.approx(other.predicted_damage, rel=1e-4)
    assert plan.source != plan.target

    tokenizer = families.load(str(tmp_path / "m"))[1]
    for healed in (False, True):
        build(source, plan, tmp_path / "w", tmp_path / "ours", tokenizer, rows if healed else None)
        cut = reshape(family, reference, plan, moments)
        cut = refit(family, reference, cut, rows)[0] if healed else cut
        save(family, cut, tokenizer, tmp_path / "theirs", False)
        ours, theirs = (
            {key: t for file in (tmp_path / side).glob("*.safetensors") for key, t in load_file(file).items()}
            for side in ("ours", "theirs")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), "tensors are equal to the bit"
        a, b = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs"))
        assert a == b
    mine, again = (families.load(str(tmp_path / side))[0] for side in ("ours", "theirs"))
    with torch.no_grad():
        assert torch.equal(mine(rows).logits, again(rows).logits)


def test_a_streamed_refit_is_held_back_as_strongly_as_was_asked(tmp_path):
    family = made("llama", tmp_path / "m")
    source, rows = Streamed(tmp_path / "m"), family.example(in_memory(family, tmp_path / "m").config, 6, 24)
    readings = probe.probe(source, rows, probe.Wanted("m", few=48), tmp_path / "w")
    plan = strategies.allocate(readings, (parse("kv=50%", source.shape),), allow=("qk", "v"))
    tokenizer, gains = families.load(str(tmp_path / "m"))[1], []
    for ridge in (None, 1e6):
        found = build(source, plan, tmp_path / "w", tmp_path / f"made-{ridge}", tokenizer, rows, ridge=ridge)
        gains.append(found.layers[0]["attention"])
    free, held = gains
    assert free.error_after < free.error_before * 0.99
    assert held.error_after > held.error_before * 0.99, "so strong a pull leaves the weights as they were"


@pytest.mark.parametrize(("name", "allow"), [("llama", ("bits", "mlp")), ("gpt2", ("qk", "v", "mlp"))])
def test_shared_rows_are_cut_and_layers_trained_as_in_memory(name, allow, tmp_path, monkeypatch):
    family = made(name, tmp_path / "m")
    source = Streamed(tmp_path / "m", pooled=lambda stock: 2)
    stock, tokenizer = families.load(str(tmp_path / "m"))
    reference = family.tailor(stock, 2)
    rows = family.example(reference.config, 6, 24)  # as few as these are held out too
    readings = probe.probe(source, rows, probe.Wanted("m", mlp=True, bits=True, few=96), tmp_path / "w")
    limits = parse("kv=30%", source.shape), parse("params=95%", source.shape)
    plan = strategies.allocate(readings, limits, allow=allow)
    assert all(layer.pooled == 2 and layer.coded == ("bits" in allow) for layer in plan.target.layers)
    files = [probe.moments_file(tmp_path / "w", index) for index in range(len(source.layers))]
    moments = [read_layer(file, shape, 0) for file, shape in zip(files, source.shape.layers, strict=True)]

    monkeypatch.setitem(blockwise.BATCH_TOKENS, "cpu", 96)
    prepared, options = Causal().prepare(rows, 0), Options(steps=20)
    job = Job(family, Causal(), reference, reshape(family, reference, plan, moments), prepared, prepared)
    cut, told = heal.healed("blockwise", replace(job, options=options))
    save(family, cut, tokenizer, tmp_path / "theirs", False)
    found = build(source, plan, tmp_path / "w", tmp_path / "ours", tokenizer, rows, options)
    assert found.layers == told.layers and found.curve == told.curve and found.tokens == told.tokens
    assert any(part["stream"].error_after < part["stream"].error_before for part in found.layers[:-1])
    ours, theirs = (
        {key: t for file in (tmp_path / side).glob("*.safetensors") for key, t in load_file(file).items()}
        for side in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs), "tensors are equal to the bit"


def test_where_bits_alone_are_chosen_only_they_are_priced_and_alike(tmp_path):
    family = made("llama", tmp_path / "m")
    source = Streamed(tmp_path / "m", pooled=lambda stock: 2)
    rows, asked = family.example(source.model.config, 6, 24), probe.Wanted("m", bits=True, few=96)
    alone = probe.probe(source, rows, asked._replace(sizes=False), tmp_path / "alone")
    every = probe.probe(source, rows, asked, tmp_path / "every")
    assert {curve.kind for curve in alone.curves} == {"damage.k_bits", "damage.v_bits"}
    assert all(every.curve(curve.kind) == curve for curve in alone.curves)
    limits = (parse("kv=30%", source.shape),)
    assert strategies.allocate(alone, limits, allow=("bits",)) == strategies.allocate(every, limits, allow=("bits",))


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2"])  # LayerNorm, and scaled embeddings
def test_in_bfloat16_a_streamed_model_has_the_same_prices(name, tmp_path):
    family = made(name, tmp_path / "m")
    rows, wanted = family.example(in_memory(family, tmp_path / "m").config, 6, 24), probe.Wanted("m", few=48)
    exact, short = (
        probe.probe(Streamed(tmp_path / "m", dtype=dtype), rows, wanted, tmp_path / str(dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in zip(exact.curves, short.curves, strict=True):
        for a, b in zip(one.values, other.values, strict=True):
            assert b == pytest.approx(a, rel=0.1, abs=0.02 * max(a))


def test_streams_in_memory_are_written_in_time_and_a_walk_resumes_there(tmp_path, monkeypatch):
    monkeypatch.setattr(_store, "available_bytes", lambda place: 10**9)

    def walked(every: float, stop: int | None = None) -> list[int]:
        monkeypatch.setattr(_store, "EVERY", every)
        store, seen = StreamStore(tmp_path / "s", {"work": 1}, "meta"), []
        monkeypatch.setattr(store, "device", torch.device("cpu"))  # which is not "cpu": streams are held
        for index in store.walk(4, lambda: store.__setitem__((0, "x"), torch.zeros(2)), lambda items, label: items, ""):
            if index == stop:
                return seen
            seen.append(index)
            store[index + 1, "x"] = store[index, "x"] + 1
        assert store[4, "x"].tolist() == [4, 4]
        return seen

    assert walked(1000, stop=3) == [0, 1, 2]
    assert walked(0, stop=3) == [0, 1, 2], "nothing had been written"
    assert walked(1000) == [3], "all before had been"
    assert walked(1000) == [], "the last is always written"


@pytest.mark.parametrize("heads", [1, 2])  # that share rows
def test_a_model_that_was_cut_before_is_cut_again(heads, tmp_path):
    family = made("llama", tmp_path / "m")
    tokenizer = families.load(str(tmp_path / "m"))[1]
    rows = family.example(None, 4, 24)
    for number, limit in enumerate(("kv=75%", "kv=70%")):
        source = Streamed(tmp_path / "0") if number else Streamed(tmp_path / "m", pooled=lambda stock: heads)
        readings = probe.probe(source, rows, probe.Wanted("m", few=48), tmp_path / f"w{number}")
        plan = strategies.allocate(readings, (parse(limit, source.shape),))
        build(source, plan, tmp_path / f"w{number}", tmp_path / str(number), tokenizer, rows)
    assert source.shape.layers[0].pooled == heads
    reference = in_memory(family, tmp_path / "0")
    write_moments(tmp_path / "moments.safetensors", gram.collect(family, reference, rows, False))
    cut = reshape(family, reference, plan, read_moments(tmp_path / "moments.safetensors", "cpu", source.shape.layers))
    healed = refit(family, reference, cut, rows)[0]
    balance(family.blocks(healed))  # as every model that is saved
    theirs = family.state_of(healed)
    ours = {key: t for file in (tmp_path / "1").glob("*.safetensors") for key, t in load_file(file).items()}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def small_model(path: Path) -> Path:
    """A tiny bfloat16 model that knows the embedded tokenizer, in several files."""
    family = next(f for f in families.known() if f.name == "llama")
    with families.quietly():
        family.tiny(vocab_size=4096, tie_word_embeddings=True).bfloat16().save_pretrained(path, max_shard_size="200KB")
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


class Killed(Exception):
    pass


def test_other_kinds_of_models_and_broken_ones_are_refused(model, tmp_path):
    bert = next(f for f in families.known() if f.name == "bert")
    with families.quietly():
        bert.tiny("bert").save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="only decoders that write text"):
        Streamed(tmp_path / "bert")
    shutil.copytree(model, tmp_path / "broken")
    index = json.loads((tmp_path / "broken" / "model.safetensors.index.json").read_text())
    lost = index["weight_map"].pop("model.norm.weight")
    (tmp_path / "broken" / lost).unlink()
    with pytest.raises(ModelError, match="streaming reads safetensors only"):
        Streamed(tmp_path / "broken")
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != lost}
    (tmp_path / "broken" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="is damaged"):
        Streamed(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").unlink()
    (tmp_path / "text").write_bytes(b"no header at all")
    with pytest.raises(ModelError):
        Streamed(tmp_path / "broken")


def test_only_the_rows_that_occur_are_read_of_a_table(model):
    files = Checkpoint(model)
    table, rows = files.tensor("model.embed_tokens.weight"), torch.tensor([3, 4095])
    assert torch.equal(files.rows("model.embed_tokens.weight", rows, torch.float32), table[rows].float())
    assert torch.equal(torch.cat(list(files.slices("model.embed_tokens.weight", 1000))), table)


def test_a_store_is_empty_for_other_work(tmp_path):
    store = StreamStore(tmp_path / "s", {"plan": 1})
    store[0, "a"] = torch.ones(2)
    assert store.position() is None
    store.complete(0)
    store[1, "a"] = torch.zeros(2)
    assert StreamStore(tmp_path / "s", {"plan": 1}).position() == 0, "what is not complete does not count"
    store.complete(1)
    assert not (tmp_path / "s" / "00000").exists() and store.position() == 1
    assert StreamStore(tmp_path / "s", {"plan": 2}).position() is None


def test_a_store_that_was_cleared_in_part_is_empty(tmp_path, monkeypatch):
    store = StreamStore(tmp_path / "s", {"plan": 1})
    store[0, "a"] = torch.ones(2)
    store.complete(0)

    def killed(folder, **_):
        (folder / "00000" / "a.safetensors").unlink()
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", killed)
        store.clear()
    assert StreamStore(tmp_path / "s", {"plan": 1}).position() is None, "its streams are gone: nothing to resume"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("way", [dict(recompute=True), dict(recompute=True, spread=True), dict(spread=True)])
def test_prices_are_the_same_with_less_memory(name, way):
    from headwise.probes import sensitivity

    family = next(f for f in families.known() if f.name == name)
    model = family.tailor(family.tiny(name))
    rows = family.example(model.config, 4, 24)
    moments = gram.collect(family, model, rows, True)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain, orders = sensitivity.measure(family, model, rows, moments, True, 0, recompute=False)
    less, others = sensitivity.measure(family, model, rows, moments, True, 0, **way)
    if torch.cuda.is_available() and "spread" in way:  # other kernels
        for one, two in zip(plain, less, strict=True):
            for a, b in zip(one.values, two.values, strict=True):
                assert a == pytest.approx(b, rel=1e-3, abs=1e-9)
    else:
        assert less == plain and orders == others
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items()), "as it was"
    assert all(p.requires_grad for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
