"""What a model is for: inputs, answers and differences of every task; encoders from the command line to the report."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity, kl_div

from headwise import budgets, data, families, tasks
from headwise.checks import quality
from headwise.cuts import reshape_layer
from headwise.data import own_text
from headwise.errors import DataError, ModelError
from headwise.families import BARE, CLASSIFIER, MASKED
from headwise.families.bert import FAMILY as bert
from headwise.families.distilbert import FAMILY as distilbert
from headwise.families.llama import FAMILY as llama
from headwise.families.modernbert import FAMILY as modernbert
from headwise.heal.refit import refit
from headwise.probes import gram, sensitivity, swap
from headwise.tasks.causal import Causal
from headwise.tasks.classification import Classification
from headwise.tasks.embedding import Embedding
from headwise.tasks.image_classification import ImageClassification
from headwise.tasks.image_embedding import ImageEmbedding
from headwise.tasks.masked import IGNORED, Masked
from headwise.tasks.seq2seq import Seq2Seq
from headwise.tasks.speech import Speech
from headwise.types import LayerKeep

CLS, SEP, MASK, PAD = 1, 2, 3, 0
HEADS = {"masked": MASKED, "embedding": BARE, "classification": CLASSIFIER}
KINDS = [(bert, "bert"), (bert, "roberta"), (distilbert, "distilbert"), (modernbert, "modernbert")]
IDS = torch.arange(60).reshape(3, 20) % 80 + 5


def task_for(name: str, width: int = 32) -> tasks.Task:
    made = {"masked": Masked(MASK, (CLS, SEP, PAD)), "embedding": Embedding(width), "classification": Classification()}
    made |= {
        "image_embedding": ImageEmbedding(width, row_tokens=20),
        "image_classification": ImageClassification(row_tokens=20),
        "seq2seq": Seq2Seq(),
        "speech": Speech(),
    }
    return made.get(name) or Causal()


def tokenizer():
    """Single letters between [CLS] and [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    letters = list("abcdefghijklmnopqrstuvwxyz")
    words = [*special.values(), "[UNK]", *letters, *(f"##{c}" for c in letters)]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **special)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    draw = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in draw.integers(0, 26, draw.integers(2, 9))) for _ in range(2000)]
    path.write_text(" ".join(words))
    return path


# Text.


def test_blocks_of_encoders_are_closed_and_of_several_lengths(text):
    blocks = data.closed_blocks(data.documents(str(text)), tokenizer(), 64, 40)
    lengths = (blocks != data.NOTHING).sum(1)
    assert set(lengths.tolist()) == {8, 16, 32, 64} == set(data.closed_lengths(64))
    for row, length in zip(blocks.tolist(), lengths.tolist(), strict=True):
        assert row[0] == CLS and row[length - 1] == SEP, "a text is opened and closed"
        assert not {CLS, SEP, data.NOTHING} & set(row[1 : length - 1])
        assert set(row[length:]) <= {data.NOTHING}, "shorter ones end early"
    assert len(blocks) == 40 and data.count_tokens(blocks) == int(lengths.sum())
    assert torch.equal(blocks, data.closed_blocks(data.documents(str(text)), tokenizer(), 64, 40)), "seeded"


def test_batches_hold_every_row_once_and_rows_of_one_length(text):
    blocks = data.closed_blocks(data.documents(str(text)), tokenizer(), 32, 30)
    found = data.batches(blocks, 128)
    assert all((part != data.NOTHING).all() and part.numel() <= 128 for part in found)
    rows = sorted(tuple(row) for part in found for row in part.tolist())
    assert rows == sorted(tuple(t for t in row if t != data.NOTHING) for row in blocks.tolist())
    assert torch.equal(torch.cat(data.batches(IDS, 20)), IDS), "rows of equal length stay in order"


def test_too_little_text_is_said_with_its_size():
    with pytest.raises(DataError, match="has 2 tokens, fewer than one block of"):
        data.closed_blocks(["ab"], tokenizer(), 8)


def test_a_model_that_cannot_write_is_refused_its_own_text():
    with pytest.raises(DataError, match="BertForMaskedLM writes no text that it could be calibrated on; give --data"):
        own_text.written_by(bert.tiny("bert"), 1, 8)


# Inputs and labels.


def test_masking_hides_a_share_of_the_text_and_never_its_ends(text):
    task = task_for("masked")
    ids = task.blocks(data.documents(str(text)), tokenizer(), 64, 40)
    found = task.prepare(ids, 0)
    hidden = found.labels != IGNORED
    assert torch.equal(hidden, found.inputs == MASK) and torch.equal(found.labels[hidden], ids[hidden])
    assert torch.equal(found.inputs[~hidden], ids[~hidden])
    assert not torch.isin(ids[hidden], torch.tensor([CLS, SEP, data.NOTHING])).any()
    length = (ids != data.NOTHING).sum(1)
    assert torch.equal(hidden.sum(1), (length * 0.15).round().clamp_min(1).long()), "the same in rows of one length"
    assert not torch.equal(task.prepare(ids, 1).labels, found.labels), "another seed, other tokens"


@pytest.mark.parametrize("name", tasks.known())
def test_a_row_is_prepared_the_same_whatever_is_beside_it(name):
    task = task_for(name)
    whole, part = task.prepare(IDS, 3), task.prepare(IDS[[2, 0]], 3)
    assert torch.equal(whole.inputs[[2, 0]], part.inputs) and torch.equal(whole.labels[[2, 0]], part.labels)
    rows = [row for batch in whole.batches(20) for row in batch.inputs]
    assert torch.equal(torch.stack(rows), whole.inputs[:, : len(rows[0])]) and len(whole.batches(20)) == 3
    assert (whole.inputs[:, len(rows[0]) :] == data.NOTHING).all()


def test_every_task_has_its_file_and_name():
    assert set(tasks.known()) == set(families.TASKS)
    for name in tasks.known():
        assert task_for(name).name == name


# Answers.


@pytest.mark.parametrize(("family", "kind"), KINDS, ids=[kind for _, kind in KINDS])
@pytest.mark.parametrize("name", HEADS)
def test_answers_layer_by_layer_are_those_of_the_model(name, family, kind):
    model, task = family.tailor(family.tiny(kind, head=HEADS[name])), task_for(name)
    batch = task.prepare(IDS, 0)
    with torch.no_grad():
        stream = family.embed(model, batch.inputs)
        for index, context in enumerate(family.layer_contexts(model, batch.inputs)):
            stream = family.run_layer(model, index, stream, context)
        want = task.outputs(family, model, batch)
        assert torch.allclose(task.outputs_from(family, model, stream, batch), want, atol=1e-5)
        assert torch.allclose(task.outputs(family, model, batch, family.embed(model, batch.inputs)), want, atol=1e-5)
        assert task.divergence(want, want).abs().max() < 1e-6 and len(want) == len(IDS)


@pytest.mark.parametrize(("family", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_padding_changes_nothing(family, kind):
    model = family.tailor(family.tiny(kind, head=BARE))
    pad = model.config.pad_token_id
    rows = torch.cat((IDS[:, :12], torch.full((3, 5), pad)), 1)
    with torch.no_grad():
        alone = model(IDS[:, :12]).last_hidden_state
        padded = model(rows, attention_mask=(torch.arange(17) < 12).long().expand(3, -1)).last_hidden_state
    assert torch.allclose(padded[:, :12], alone, atol=1e-5)


@pytest.mark.parametrize(("family", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_rows_of_any_length_go_layer_by_layer(family, kind, text):
    model, task = family.tailor(family.tiny(kind)), task_for("masked")
    model.config._attn_implementation = "sdpa"
    rows = task.blocks(data.documents(str(text)), tokenizer(), 64, 12)
    assert len(data.rows_by_length(rows, 64)) > 2
    swapper = swap.Swapper(family, model, rows, task)
    for batch, reference in zip(swapper.batches, swapper.reference, strict=True):
        with torch.no_grad():
            assert torch.allclose(task.outputs(family, model, batch), reference, atol=1e-4)
    _, found = refit(family, model, family.tailor(model), task.prepare(rows, 0).inputs)
    assert all(part.error_after < 1e-5 for layer in found.layers for part in layer.values()), "nothing to heal"


def test_divergences_are_what_they_are_called():
    a, b = torch.randn(4, 3, 7).log_softmax(-1), torch.randn(4, 3, 7).log_softmax(-1)
    want = torch.stack([kl_div(y, x, reduction="sum", log_target=True) / 3 for x, y in zip(a, b, strict=True)])
    for name in ("causal", "masked"):
        assert torch.allclose(task_for(name).divergence(a, b), want, atol=1e-6)
    several = Classification("several", 3).divergence(a, b)
    assert torch.allclose(several.float(), 3 * want, atol=1e-5), "summed over answers"
    u, v = (torch.nn.functional.normalize(torch.randn(4, 32), dim=-1) for _ in range(2))
    assert torch.allclose(task_for("embedding").divergence(u, v), 1 - cosine_similarity(u, v), atol=1e-6)


# Losses: half the expected square of a first-order change is the divergence.


def test_random_signs_price_an_embedding_by_its_cosine():
    u, v = torch.nn.functional.normalize(torch.randn(2, 5, dtype=torch.float64), dim=-1)
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=5)), dtype=torch.float64)
    loss = Embedding(5).loss
    changes = torch.stack([loss(v, sign) - loss(u, sign) for sign in signs])
    assert changes.square().mean() / 2 == pytest.approx(1 - float(u @ v))
    drawn = Embedding(5).prepare(IDS, 0).labels
    assert drawn.shape == (3, 5) and set(drawn.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("task", [Classification(), Classification("several", 3), Classification("score", 2)])
def test_drawn_answers_price_a_classifier_by_its_kl(task):
    logits = torch.tensor([[0.3, -0.2, 0.9]])[:, : task.labels_per_row if task.kind != "one" else 3].double()
    step = 1e-3 * torch.tensor([[1.0, -2.0, 0.5]])[:, : logits.shape[1]].double()
    draw = torch.rand(20_000, task.labels_per_row, generator=torch.Generator().manual_seed(0)).double()
    moved = logits.clone().requires_grad_()
    changes = []
    for labels in draw[:: 20 if task.kind == "several" else 40]:
        (slope,) = torch.autograd.grad(task.loss(task.answers(moved), labels.unsqueeze(0)), moved)
        changes.append(float((slope * step).sum()))
    kl = float(task.divergence(task.answers(logits), task.answers(logits + step)))
    assert np.square(changes).mean() / 2 == pytest.approx(kl, rel=0.15)


def test_a_causal_loss_is_the_cross_entropy():
    logits, ids = torch.randn(2, 6, 9), torch.randint(0, 9, (2, 6))
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    assert torch.allclose(Causal().loss(logits.log_softmax(-1), ids), want)


@pytest.mark.parametrize("name", HEADS)
def test_predicted_damage_has_the_size_of_the_measured(name):
    stock = bert.tiny("bert", head=HEADS[name], hidden_size=64, initializer_range=0.1)
    model, task = bert.tailor(stock), task_for(name, 64)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (48, 16), generator=draw)
    inputs = task.prepare(ids, 0).inputs
    moments = gram.collect(bert, model, inputs, mlp=False)
    curves, _ = sensitivity.measure(bert, model, ids, moments, False, 0, task=task)
    swapper = swap.Swapper(bert, model, ids, task)
    shapes, curve = bert.shape_of(model.config).layers, next(c for c in curves if c.kind == "damage.v")
    assert curve.unit == task.unit
    predicted, measured = 0.0, 0.0
    for layer, (ticks, values) in enumerate(zip(curve.ticks, curve.values, strict=True)):
        target = replace(shapes[layer], v_dim=ticks[-1])
        cut = reshape_layer(bert, model, layer, target, LayerKeep(), moments[layer])
        predicted, measured = predicted + values[-1], measured + swapper.damage(layer, cut)[0]
    assert 0.5 < predicted / measured < 2


# Which task a model has.


@pytest.mark.parametrize(("family", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_the_head_says_what_a_model_is_for(family, kind):
    for name, head in HEADS.items():
        model = family.tiny(kind, head=head)
        assert families.task_of(model.config) == families.task_of(family.tailor(model).config) == name
        assert families.auto_class_of(family.tailor(model)) == head


def test_models_without_a_known_head():
    config = bert.tiny("bert").config
    for head, name in (("BertForPreTraining", "masked"), ("BertModel", "embedding")):
        config.architectures = [head]
        assert families.task_of(config) == name
    config.architectures = ["BertForQuestionAnswering"]
    with pytest.raises(ModelError, match="QuestionAnswering is for none of the tasks .*Choose one of them with --task"):
        families.task_of(config)
    assert families.task_of(llama.tiny().config) == "causal", "a decoder without a named task is causal"
    config.is_decoder = True
    with pytest.raises(ModelError, match="made into decoders are not supported"):
        bert.shape_of(config)


def test_masked_text_needs_a_mask_token():
    made = tokenizer()
    made.mask_token = None
    with pytest.raises(ModelError, match="has no mask token"):
        Masked.for_model(None, made, "")


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        (dict(num_labels=3), Classification()),
        (dict(num_labels=1), Classification("score", 1)),
        (dict(num_labels=4, problem_type="multi_label_classification"), Classification("several", 4)),
        (dict(num_labels=2, problem_type="regression"), Classification("score", 2)),
    ],
)
def test_a_classifier_is_read_by_its_configuration(settings, task):
    model = bert.tiny("bert", head=CLASSIFIER, **settings)
    assert tasks.of(model, tokenizer()) == task


# Quality.


def test_embeddings_are_judged_by_their_cosine():
    task, source = task_for("embedding"), bert.tailor(bert.tiny("bert", head=BARE))
    same = quality.compare(bert, source, source, IDS, task=task)
    assert same.summary() == {"cosine": 1.0, "cosine_low": 1.0, "cosine_high": 1.0}
    assert same.damage()["measured"] == same.expected_damage() == 0.0
    other = bert.tailor(source)
    with torch.no_grad():
        bert.blocks(other)[0].output.weight *= 0
    found = quality.compare(bert, source, other, IDS, task=task)
    with torch.no_grad():
        a, b = (model(IDS).last_hidden_state.mean(1) for model in (source, other))
    assert found.summary()["cosine"] == pytest.approx(float(cosine_similarity(a, b).mean()), abs=1e-5)
    assert found.damage()["measured"] == pytest.approx(1 - found.summary()["cosine"])


def test_masked_text_is_judged_where_it_was_masked():
    task, model = task_for("masked"), bert.tailor(bert.tiny("bert"))
    found = quality.compare(bert, model, model, IDS, task=task, seed=5).summary()
    batch = task.prepare(IDS, 5)
    with torch.no_grad():
        loss = model(batch.inputs, labels=batch.labels).loss
    assert found["loss_before"] == found["loss_after"] == pytest.approx(float(loss), rel=1e-5)
    assert found["masked_token_agreement"] == 1 and not any(key.startswith("perplexity") for key in found)


# Budgets.


def test_attention_parameters_are_those_of_the_attention_blocks():
    model = bert.tailor(bert.tiny("bert"))
    shape = bert.shape_of(model.config)
    blocks = bert.blocks(model)
    counted = sum(p.numel() for block in blocks for part in (block.attention, block.output) for p in part.parameters())
    assert budgets.parse("attention_params=100%", shape).limit == counted


def test_pooling_is_read_and_unknown_ways_are_refused(tmp_path):
    model = bert.tiny("bert", head=BARE)
    (tmp_path / "config.json").write_text("{}")
    assert tasks.of(model, tokenizer(), str(tmp_path)) == Embedding(32, "mean"), "unless said otherwise"
    (tmp_path / "modules.json").write_text('[{"idx": 1, "path": "1_Pooling"}]')
    (tmp_path / "1_Pooling").mkdir()
    for way, pooling in (("cls_token", "first"), ("mean_tokens", "mean")):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{way}": True}))
        assert tasks.of(model, tokenizer(), str(tmp_path)) == Embedding(32, pooling)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="pools its tokens by pooling_mode_max_tokens; supported: pooling_mode_mean"):
        tasks.of(model, tokenizer(), str(tmp_path))
