"""Images from any source, what models say about them, and vision models from the command line to the report."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from test_pipeline import call, refused

from headwise import families, tasks
from headwise.checks import quality
from headwise.data import images
from headwise.errors import DataError, ModelError
from headwise.families.clip import FAMILY as clip
from headwise.families.clip import PROJECTED
from headwise.families.vit import FAMILY as vit
from headwise.tasks.image_classification import ImageClassification

NAMES = {"cat": 0, "dog": 1, "sea lion": 2}


class Plain:
    """An image processor that scales only."""

    def __call__(self, images, return_tensors):
        return {"pixel_values": torch.stack([torch.from_numpy(np.array(x)).permute(2, 0, 1) / 255 for x in images])}


def processor(size=16):
    from transformers import ViTImageProcessor

    logging.getLogger("transformers").setLevel(logging.ERROR)  # which says that torchvision is not there
    return ViTImageProcessor(size={"height": size, "width": size})


def pixels(count, size=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


@pytest.fixture
def arrays(tmp_path):
    path = tmp_path / "images.npz"
    np.savez(path, x_train=pixels(100), y_train=np.arange(100) % 3, x_test=pixels(9, seed=1))
    return path


@pytest.fixture
def folder(tmp_path):
    from PIL import Image

    for index, picture in enumerate(pixels(12, size=20)):
        place = tmp_path / "pictures" / ("cat", "Sea_Lion", "unicorn")[index % 3]
        place.mkdir(parents=True, exist_ok=True)
        mode = "L" if index == 0 else "RGB"
        Image.fromarray(picture).convert(mode).save(place / f"{index}.png")
    (tmp_path / "pictures" / "notes.txt").write_text("not an image")
    return tmp_path / "pictures"


# Sources.


def test_arrays_are_read_in_a_seeded_order_with_their_labels(arrays):
    found = images.read(str(arrays), Plain(), 80, 0)
    assert found.rows.shape == (80, 3, 16, 16) and found.truth.shape == (80,)
    again, other = (images.read(str(arrays), Plain(), 80, seed) for seed in (0, 1))
    assert torch.equal(found.rows, again.rows) and torch.equal(found.truth, again.truth), "seeded"
    assert not torch.equal(found.rows, other.rows)
    originals = torch.from_numpy(pixels(100)).permute(0, 3, 1, 2) / 255
    for row, label in zip(found.rows, found.truth, strict=True):
        place = int(torch.nonzero((originals == row).flatten(1).all(1)))
        assert label == place % 3, "an image keeps its label"
    fewer = images.read(str(arrays), Plain(), 10, 0)
    assert torch.equal(fewer.rows, found.rows[:10]), "more images begin with those that fewer are"


def test_a_split_of_arrays_can_be_named(arrays):
    found = images.read(f"{arrays}:test", Plain(), 100, 0)
    assert len(found.rows) == 9 and found.truth is None, "all that there are; no labels there"
    with pytest.raises(DataError, match="holds no x_validation, but x_train, y_train, x_test"):
        images.read(f"{arrays}:validation", Plain(), 9, 0)


def test_classes_of_a_folder_are_those_that_the_model_knows(folder):
    found = images.read(str(folder), processor(), 100, 0, NAMES)
    assert found.rows.shape == (12, 3, 16, 16), "grey images too, all of the size that the model reads"
    assert sorted(found.truth.tolist()) == [-1] * 4 + [0] * 4 + [2] * 4
    assert images.read(str(folder), processor(), 100, 0).truth is None, "no names, no labels"
    few = images.read(str(folder), processor(), 6, 0, NAMES)
    assert len(few.truth.unique()) > 1, "not class by class"


def test_a_data_set_is_read_by_its_columns(monkeypatch):
    from PIL import Image

    datasets = pytest.importorskip("datasets")
    column = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cow", "cat"])})
    rows = {"img": [Image.fromarray(x) for x in pixels(6)], "label": [0, 1, 2, 0, 1, 2]}
    asked = []

    def load(*arguments, **options):
        asked.append((*arguments, options["split"]))
        return datasets.Dataset.from_dict(rows, column).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = images.read("animals:small:test", Plain(), 6, 0, NAMES)
    assert asked == [("animals", "small", "test")]
    assert sorted(found.truth.tolist()) == [-1, -1, 0, 0, 1, 1], "by name, as the numbers differ"
    found = images.read("animals", Plain(), 6, 0, {"LABEL_0": 0})
    assert sorted(found.truth.tolist()) == [0, 0, 1, 1, 2, 2], "by number where the model has no names"
    rows["text"] = rows.pop("img")
    column = datasets.Features({"text": datasets.Image(), "label": datasets.Value("int64")})
    with pytest.raises(DataError, match="'animals' has no column image or img, but label, text"):
        images.read("animals", Plain(), 6, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (dict(pictures=np.zeros(3)), "holds no x or x_train or x_test, but pictures"),
        (dict(x=np.zeros((2, 4, 4, 3), np.float32)), "images are uint8"),
        (dict(x=pixels(4), y=np.arange(3)), "4 images, but 3 labels"),
        (dict(x=np.array([{}], dtype=object)), "cannot be read .*allow_pickle=False"),
    ],
    ids=["keys", "numbers", "labels", "pickles"],
)
def test_arrays_that_are_no_images_are_refused(content, words, tmp_path):
    np.savez(tmp_path / "x.npz", **content)
    with pytest.raises(DataError, match=words):
        images.read(str(tmp_path / "x.npz"), Plain(), 4, 0)


def test_what_is_no_image_is_refused(tmp_path, folder):
    with pytest.raises(DataError, match="none.npz cannot be read .*Give a folder of images"):
        images.read(str(tmp_path / "none.npz"), Plain(), 4, 0)
    np.savez(tmp_path / "zeros.npz", x=pixels(4))
    content = (tmp_path / "zeros.npz").read_bytes()
    place = content.index(b"'descr'")
    (tmp_path / "zeros.npz").write_bytes(content[:place] + bytes(40) + content[place + 40 :])
    with pytest.raises(DataError, match="zeros.npz cannot be read"):
        images.read(str(tmp_path / "zeros.npz"), Plain(), 4, 0)
    with pytest.raises(DataError, match="notes.txt holds no images. Give a folder of images"):
        images.read(str(folder / "notes.txt"), Plain(), 4, 0)
    with pytest.raises(DataError, match="gone.zip does not exist"):
        images.read(str(tmp_path / "gone.zip"), Plain(), 4, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no images"):
        images.read(str(tmp_path / "empty"), Plain(), 4, 0)
    (folder / "cat" / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="broken.png cannot be read as an image"):
        images.read(str(folder), processor(), 100, 0)


# What models say.


def test_an_image_counts_as_many_tokens_as_the_model_makes_of_it():
    model = vit.tiny("vit", num_labels=3)
    task = tasks.of(model, processor())
    assert task == ImageClassification("one", 1, 17) and task.block_tokens(512) == 17, "4 x 4 patches and a class token"
    batches = task.prepare(vit.example(model.config, 10), 0).batches(3 * 17)
    assert [len(batch.inputs) for batch in batches] == [3, 3, 3, 1]
    assert vit.shape_of(model.config).row_tokens == 17


def test_right_answers_give_an_accuracy_and_unknown_ones_are_left_out():
    model = vit.tailor(vit.tiny("vit", num_labels=3))
    other, rows = vit.tailor(model), vit.example(model.config, 20)
    with torch.no_grad():
        other.classifier.bias += torch.tensor([5.0, 0.0, 0.0])
        answers = model(rows).logits.argmax(-1)
    truth = answers.clone()
    truth[:5], truth[5:10] = -1, (answers[5:10] + 1) % 3
    task = ImageClassification(row_tokens=17)
    found = quality.compare(vit, model, other, rows, task=task, truth=truth).summary()
    assert found["accuracy_before"] == pytest.approx(10 / 15)
    assert found["accuracy_after"] == pytest.approx(float((truth[5:] == 0).double().mean()))
    assert found["accuracy_after_low"] <= found["accuracy_after"] <= found["accuracy_after_high"]
    assert not any("accuracy" in name for name in quality.compare(vit, model, other, rows, task=task).summary())


def test_clip_images_are_embedded_as_the_projection_has_them():
    model = clip.tailor(clip.tiny(PROJECTED))
    task, rows = tasks.of(model, None), clip.example(model.config, 3)
    assert task.width == 24
    with torch.no_grad():
        want = torch.nn.functional.normalize(model(rows).image_embeds, dim=-1)
        assert torch.allclose(task.outputs(clip, model, task.prepare(rows, 0)), want, atol=1e-6)


def test_both_towers_of_clip_are_refused_with_what_to_do():
    from transformers import CLIPConfig

    with pytest.raises(ModelError, match="two towers.*CLIPVisionModelWithProjection.from_pretrained"):
        families.task_of(CLIPConfig(architectures=["CLIPModel"]))


# From the command line.

SMALL = ["--tokens", "1360", "--eval-tokens", "680", "--swap-tokens", "170", "--device", "cpu"]


def saved(place, model):
    model.save_pretrained(place)
    processor().save_pretrained(place)
    return place


def test_a_classifier_of_images_from_folder_to_report(arrays, tmp_path, capsys):
    model, out = saved(tmp_path / "source", vit.tiny("vit", num_labels=3)), tmp_path / "run"
    run = ["run", model, "--budget", "params=85%", "--data", arrays, *SMALL]
    assert call(*run, "--allow", "qk,v,mlp,heads,depth", "--out", out) == 0
    said = capsys.readouterr().out
    assert "accuracy " in said and "KL to the source " in said and "all 3 checks passed" in said
    verdict = json.loads((out / "verdict.json").read_text())
    assert {"accuracy_before", "accuracy_after", "class_agreement", "kl"} <= set(verdict["quality"])
    assert verdict["speed"]["ms_per_image_after"] > 0 and verdict["tokens"] % 17 == 0
    page, card = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert "accuracy went from" in page and "pipeline_tag: image-classification" in card
    assert "AutoModelForImageClassification.from_pretrained" in card and "Time per image" in card
    for word in ("erplexity", "nats per token", "Evaluation text", "KV cache"):
        assert word not in page and word not in card
    loaded, reader = families.load(str(out / "model"))
    assert families.task_of(loaded.config) == "image_classification"
    assert reader.size["height"] == 16, "the folder brings its image processor"
    assert call("verify", out) == 0


def test_embeddings_of_images_from_folder_to_report(folder, tmp_path, capsys):
    model, out = saved(tmp_path / "source", clip.tiny(PROJECTED)), tmp_path / "run"
    assert call("run", model, "--budget", "attention_params=80%", "--data", folder, *SMALL, "--out", out) == 0
    assert "mean cosine to the source's embeddings " in capsys.readouterr().out
    card = (out / "report.md").read_text()
    assert "pipeline_tag: image-feature-extraction" in card and "1 - cosine per image" in card
    assert families.task_of(families.load(str(out / "model"))[0].config) == "image_embedding"


def test_what_vision_models_cannot_do_is_said(arrays, tmp_path, capsys):
    model = vit.tiny("vit")
    model.save_pretrained(tmp_path / "bald")
    run = ["--budget", "params=90%", *SMALL, "--out", tmp_path / "run", "--overwrite"]
    found = refused(capsys, "run", tmp_path / "bald", "--data", arrays, *run)
    assert "holds no preprocessor_config.json, which says how images are prepared" in found
    saved(tmp_path / "source", model)
    found = refused(capsys, "run", tmp_path / "source", "--data", arrays, *run, "--task", "classification")
    assert (
        "vit models cannot be reshaped for the task classification, only for: image_classification, image_emb" in found
    )
    assert "give --data FILE" in refused(capsys, "run", tmp_path / "source", *run)
