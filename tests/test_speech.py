"""Recordings from .wav files, what models write to them, and Whisper from the command line to the report."""

from __future__ import annotations

import json
import wave

import numpy as np
import pytest
import torch
from test_encoder_decoders import tokenizer
from test_pipeline import refused
from tiny_models import cut, logits, random_plan, rows, tiny
from typer.testing import CliRunner

from headwise import data, families, tasks
from headwise.cli.commands import app
from headwise.data import audio
from headwise.errors import DataError, ModelError
from headwise.families.whisper import FAMILY as whisper
from headwise.tasks.speech import Speech

RATE = 16_000


def write(path, sound, rate=RATE, channels=1, width=2):
    """A .wav file of a sound between -1 and 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes((np.repeat(sound, channels) * 32767).astype("<i2").tobytes())


def tone(hertz, seconds, rate=RATE):
    """A tone with a little noise."""
    noise = np.random.default_rng(hertz).normal(0, 0.01, int(seconds * rate))
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate) + noise


def processor():
    """Reads a second at once, as a spectrogram of six lines."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    return WhisperProcessor(WhisperFeatureExtractor(feature_size=6, chunk_length=1), tokenizer())


@pytest.fixture
def folder(tmp_path):
    for index in range(12):
        write(tmp_path / "wavs" / f"part{index % 2}" / f"{index}.wav", tone(200 + 100 * index, 0.4 + index / 20))
    (tmp_path / "wavs" / "notes.txt").write_text("not a recording")
    return tmp_path / "wavs"


# Sources.


def test_rates_and_channels_come_out_as_one(tmp_path):
    write(tmp_path / "plain.wav", tone(440, 0.5))
    want = audio.wav(tmp_path / "plain.wav", RATE)
    assert want.shape == (8000,) and want.dtype == np.float32 and 0.25 < want.max() < 0.4
    write(tmp_path / "stereo.wav", tone(440, 0.5), channels=2)
    assert np.array_equal(audio.wav(tmp_path / "stereo.wav", RATE), want)
    pure = [np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate) for rate in (RATE, 48_000, 11_025)]
    for sound, rate in zip(pure, (RATE, 48_000, 11_025), strict=True):
        write(tmp_path / f"{rate}.wav", sound, rate)
    whole = audio.wav(tmp_path / f"{RATE}.wav", RATE)
    for rate in (48_000, 11_025):
        found = audio.wav(tmp_path / f"{rate}.wav", RATE)
        assert abs(len(found) - 8000) <= 2
        assert np.abs(found[:7990] - whole[:7990]).max() < 0.02, f"{rate} Hz is heard at its pitch"


def test_rows_hold_the_spectrogram_as_the_extractor_makes_it(folder):
    extractor = processor().feature_extractor
    heard = audio.read(str(folder), extractor, 8, 0)
    assert heard.rows.shape == (8, 50, 13) and heard.targets is None
    again, other = (audio.read(str(folder), extractor, 8, seed) for seed in (0, 1))
    assert torch.equal(heard.rows, again.rows) and not torch.equal(heard.rows, other.rows), "seeded"
    assert torch.equal(audio.read(str(folder), extractor, 3, 0).rows, heard.rows[:3])
    sounds = [audio.wav(path, RATE) for path in sorted(folder.rglob("*.wav"))]
    want = extractor(sounds, sampling_rate=RATE, return_tensors="pt")["input_features"]
    for features in audio.features_of(heard.rows):
        assert (want == features).flatten(1).all(1).sum() == 1, "exactly one of the files, bit for bit"


def test_long_recordings_are_cut_in_pieces(tmp_path):
    write(tmp_path / "wavs" / "long.wav", tone(300, 2.5))
    assert len(audio.read(str(tmp_path / "wavs"), processor().feature_extractor, 10, 0).rows) == 3
    (tmp_path / "list.jsonl").write_text(json.dumps({"audio": "wavs/long.wav", "target": "much"}))
    with pytest.raises(DataError, match="lasts 2 s, but the model hears 1 s; cut it"):
        audio.read(str(tmp_path / "list.jsonl"), processor().feature_extractor, 10, 0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none", None, "does not exist. Give a folder of .wav files"),
        ("empty", {}, "holds no recordings. Give a folder of .wav files"),
        ("text.txt", "words", "holds no recordings"),
        ("damaged", {"a.wav": b"RIFF"}, "cannot be read as a .wav file of 16 bits"),
        ("a.jsonl", '{"audio": 3}', 'line 1: every line must be {"audio": "FILE.wav"'),
        ("b.jsonl", "{", "cannot be read"),
        ("c.jsonl", '{"audio": "no.wav"}', "no.wav cannot be read"),
    ],
)
def test_bad_sources_are_refused_with_what_is_wanted(name, content, words, tmp_path):
    if isinstance(content, dict):
        (tmp_path / name).mkdir()
        for file, inside in content.items():
            (tmp_path / name / file).write_bytes(inside)
    elif content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as found:
        audio.read(str(tmp_path / name), processor().feature_extractor, 4, 0)
    assert words in str(found.value)


def test_other_sample_widths_are_refused(tmp_path):
    write(tmp_path / "deep.wav", tone(300, 0.1), width=4)
    with pytest.raises(DataError, match="has 32 bits where 16 are read"):
        audio.wav(tmp_path / "deep.wav", RATE)


def test_an_extractor_that_gives_absurd_numbers_is_refused(folder):
    extractor = processor().feature_extractor
    extractor.padding_value = 1e30
    with pytest.raises(DataError, match="numbers that no spectrogram holds"):
        audio.read(str(folder), extractor, 4, 0)


def test_targets_on_some_lines_only_are_refused(folder, tmp_path):
    lines = [{"audio": "wavs/part0/0.wav", "target": "a"}, {"audio": "wavs/part1/1.wav"}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match='"target" on some lines only'):
        audio.read(str(tmp_path / "some.jsonl"), processor().feature_extractor, 4, 0)


# The task.


def hearing(**more):
    """A model that hears a second, and begins its texts with a language (detected), a task and no times."""
    from transformers import GenerationConfig

    words = tokenizer()
    special = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), words.eos_token_id)
    size = dict(vocab_size=len(words), max_source_positions=50, max_target_positions=32)
    model = whisper.tiny(**size, **special, decoder_start_token_id=7, **more)
    own = dict(lang_to_id={"<|en|>": 8, "<|de|>": 9}, task_to_id={"transcribe": 10, "translate": 11})
    own |= dict(task="transcribe", is_multilingual=True, no_timestamps_token_id=12, alignment_heads=[[0, 1], [1, 3]])
    model.generation_config = GenerationConfig(**special, **own, decoder_start_token_id=7, return_timestamps=False)
    return model


def test_texts_begin_as_the_model_begins_them_and_are_its_own(folder):
    model, reader = hearing(), processor()
    task = tasks.of(model, reader)
    assert task == Speech(50, 32, tokenizer().eos_token_id)
    found = task.read(str(folder), reader, 64, 5, 0).rows
    ids = task.complete(model, found, 3, lambda items, label: items)
    assert torch.equal(ids, task.complete(model, found, 3, lambda items, label: items)), "seeded"
    assert torch.equal(ids[:, :50], found), "the sound stays"
    for row in data.marks_of(ids)[:, 50:].tolist():
        assert row[0] == data.WRITTEN and row[1] == 7 and row[2] in (8, 9) and row[3:5] == [10, 12]
        text = [token for token in row[1:] if token != data.NOTHING]
        assert task.end not in text[:-1] and (text[-1] == task.end or len(text) == 32)
    sizes = [(batch.inputs.shape[1], batch.labels.shape[1]) for batch in task.prepare(ids, 0).batches()]
    assert all(a == b for a, b in sizes), "a label for every place"


def test_given_texts_follow_the_models_own_beginning(folder, tmp_path):
    words, model = tokenizer(), hearing()
    lines = [{"audio": f"wavs/part{i % 2}/{i}.wav", "target": f"word {'more ' * i}"} for i in range(4)]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = tasks.of(model, processor())
    found = task.read(str(tmp_path / "list.jsonl"), processor(), 64, 9, 0).rows
    ids = task.complete(model, found, 0, lambda items, label: items)
    texts = []
    for row in data.marks_of(ids)[:, 50:].long().tolist():
        assert row[0] == data.GIVEN and row[1] == 7 and row[3:5] == [10, 12]
        text = [token for token in row[5:] if token != data.NOTHING]
        assert text[-1] == task.end
        texts.append(words.decode(text[:-1]))
    assert sorted(texts) == sorted(line["target"] for line in lines)
    batch = task.prepare(ids[:1], 0).batches()[0]
    inputs, labels = whisper.arguments(batch.inputs)["decoder_input_ids"], batch.labels[:, 51:]
    assert torch.equal(inputs[:, 1:], labels[:, :-1]) and task.terms(batch) == labels.shape[1]


def test_an_extractor_of_another_length_is_refused():
    with pytest.raises(ModelError, match="makes 100 frames where the model hears 20"):
        tasks.of(tiny(whisper, "whisper", {}), processor())


def test_heads_that_tell_times_are_named_only_while_they_are_all_there():
    model = hearing()
    assert whisper.tailor(model).generation_config.alignment_heads == [[0, 1], [1, 3]]
    plan = random_plan(whisper, model, 1)
    assert not hasattr(cut(whisper, model, plan).generation_config, "alignment_heads")
    assert model.generation_config.alignment_heads, "the source keeps its own"


def test_sound_changes_the_answers():
    model = tiny(whisper, "whisper", {})
    ids = rows(model)
    other = ids.clone()
    other[:, 3, 1:] += 1
    assert not torch.equal(logits(model, ids), logits(model, other))


# The command line.


def test_the_command_line_from_recordings_to_a_verified_model(folder, tmp_path):
    hearing().save_pretrained(tmp_path / "source")
    processor().save_pretrained(tmp_path / "source")
    options = "--budget params=85% --tokens 800 --eval-tokens 400 --swap-tokens 120 --allow qk,v,mlp,heads,depth"
    arguments = ["run", str(tmp_path / "source"), *options.split(), "--data", str(folder)]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert all(check["passed"] for check in verdict["checks"]), verdict["checks"]
    assert verdict["size"]["parameters_after"] <= 0.85 * verdict["size"]["parameters_before"]
    assert "kl" in verdict["quality"] and "loss_after" not in verdict["quality"], "its own texts prove nothing"
    assert len(verdict["samples"]) == 3 and verdict["speed"]["prompt_tokens"] == 50
    report = (tmp_path / "run" / "report.html").read_text()
    assert "AutoModelForSpeechSeq2Seq" in report and "nats per transcript token" in report
    saved = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert {"preprocessor_config.json", "tokenizer.json", "generation_config.json"} <= saved
    model, reader = families.load(str(tmp_path / "run" / "model"))
    assert model.generation_config.lang_to_id == {"<|en|>": 8, "<|de|>": 9}, "it writes as the source does"
    heard = reader.feature_extractor(tone(300, 0.5), sampling_rate=RATE, return_tensors="pt")["input_features"]
    assert isinstance(reader.decode(model.generate(heard, max_new_tokens=8)[0]), str)


def test_without_recordings_the_command_line_says_what_to_give(tmp_path, capsys):
    hearing().save_pretrained(tmp_path / "source")
    tokenizer().save_pretrained(tmp_path / "source")
    line = ["run", str(tmp_path / "source"), "--budget", "params=85%", "--out", str(tmp_path / "run")]
    assert "holds no preprocessor_config.json, which says how recordings are prepared" in refused(capsys, *line)
    processor().save_pretrained(tmp_path / "source")
    assert "hears a recording before it writes one; give recordings with --data FOLDER" in refused(capsys, *line)
