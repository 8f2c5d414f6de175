"""What cannot work is told at once: before weights are loaded, and before the run folder is there."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from contextlib import redirect_stderr
from dataclasses import replace

import pytest
import torch
from conftest import invent
from transformers import AutoTokenizer

from headwise import budgets, cli, families, heal, preflight, strategies
from headwise.data import audio, images, overlap, own_text
from headwise.errors import HeadwiseError, PlanError
from headwise.families.llama import FAMILY as llama
from headwise.preflight import _disk
from headwise.progress import shown, silently
from headwise.runs.folder import RunFolder
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.stages import frontier
from headwise.stages.allocate import allocate_in
from headwise.stages.report import write_report
from headwise.stages.texts import read_texts
from headwise.strategies import _reach
from headwise.tasks.causal import Causal
from headwise.types import Readings

SMALL = {"tokens": 1024, "eval_tokens": 512, "swap_tokens": 128, "length": 64, "device": "cpu"}
TEXT = "\n".join(f"line {number} has words enough to count as a line of text" for number in range(4000))


@pytest.fixture(scope="module")
def model(tiny_folder):
    return str(tiny_folder)


@pytest.fixture
def texts(tmp_path):
    """A text and another, some of whose lines are those of the first."""
    lines = TEXT.splitlines()
    (tmp_path / "one.txt").write_text(TEXT)
    (tmp_path / "two.txt").write_text("\n".join(lines[:1000] + [f"{line} and more" for line in lines[1000:]]))
    (tmp_path / "other.txt").write_text("\n".join(f"{line} and more" for line in lines))
    return tmp_path


def call(*arguments):
    """The exit code of the command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def notes(model, out="nowhere", **asked):
    """What a run would be told before it begins."""
    usual = {"budgets": ("kv=75%",), "data": "stdlib", "allow": ("qk", "v"), **SMALL}
    return preflight.check(Settings(model=model, **{**usual, **asked}), out)


WRONG = [
    (["--strategy", "exakt"], "no strategy is called 'exakt'. Did you mean 'exact'?"),
    (["--allow", "qk,channels"], "'channels' is no unit that can be cut; --allow takes: qk, v, mlp"),
    (["--budget", "kv=60%"], "kv=75% and kv=60% limit the same price; give one of them."),
    (["--budget", "params=10%"], "% remains. Try --budget params="),
    (["--budget", "latency=80%@decode,soon"], "'soon' in 'decode,soon' is no phase"),
    (["--budget", "latency=80days"], "'days' is no unit of latency"),
    (["--heal", "none", "--heal-option", "steps=5"], "--heal none does not read the option steps, but blockwise and"),
    (["--heal-option", "rate=1e-3"], "--heal refit does not read the option rate, but blockwise and distill would"),
    (["--portable", "--strategy", "uniform"], "would ignore --strategy uniform; leave out one"),
    (["--strategy", "depth"], "strategy depth cuts only depth; name some of these in --allow"),
    (["--task", "speech"], "llama models cannot be reshaped for the task speech, only for: causal"),
    (["--rounds", "2"], "bits of the cache are chosen at once, not in rounds; leave out --rounds, or cut"),
    (["--pool", "3"], "2 key/value heads cannot share rows by 3"),
    (["--context", "4096"], "the context is 4,096 tokens and the model takes 128"),
    (["--device", "tpu"], "no device is called 'tpu'"),
    (["--stream", "--heal", "distill"], "--heal distill needs both models in memory"),
    (["--stream", "--data", "self"], "a streamed model is too slow to write its own text"),
    (["--budget", "KV=60"], "did you mean kv=60%?"),
    (["--data", "missing.txt"], "missing.txt does not exist"),
    (["--eval", "missing.jsonl"], "missing.jsonl does not exist"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_what_cannot_work_is_told_before_anything_is_loaded_or_written(
    wrong, said, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(families, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    out = tmp_path / "run"
    small = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert call("run", model, "--budget", "kv=75%", "--data", "stdlib", *small, *wrong, "--out", out) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error
    assert not out.exists(), "the folder was claimed for a run that cannot be"


def test_a_wrong_probe_is_told_at_once_too(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(families, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    for wrong, said in (
        (["--latency", "soon"], "'soon' in 'soon' is no phase"),
        (["--allow", "depth,width"], "'width' is no unit that can be cut"),
        (["--data", "missing.txt"], "missing.txt does not exist"),
        (
            ["--budget", "kv=2%"],
            "kv=2% is out of reach: with everything that may be cut (qk, v, mlp, bits) at its small",
        ),
        (["--budget", "kv=5%", "--allow", "qk,v"], "or allow more with --allow qk,v,mlp,heads,kv_heads,depth,bits"),
        (["--budget", "kv=2%", "--stream"], "with everything that may be cut (qk, v, mlp, bits) at its small"),
    ):
        assert call("probe", model, "--device", "cpu", "--data", "stdlib", *wrong, "--out", tmp_path / "run") == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_least_that_is_promised_can_be_had():
    """The share that the early error proposes is the one that the solver reaches with every legal size priced."""
    readings = invent(3)
    shape = replace(readings.source)
    ticks = {kind: min(readings.curve(f"damage.{kind}").ticks[0]) for kind in ("v", "mlp")}
    grain = replace(shape.grain, qk_floor=ticks["v"], v_floor=ticks["v"], mlp_floor=ticks["mlp"])
    shape = replace(shape, grain=grain)
    readings = replace(readings, shape=shape)
    for name, allow in (("kv", ("qk", "v")), ("params", ("qk", "v", "mlp", "heads")), ("flops", ("mlp", "depth"))):
        early, late = (_refused(check, shape, f"{name}=1%", allow) for check in (_early, _late(readings)))
        assert early == late
        assert not _refused(_early, shape, early.split("--budget ")[1].split()[0].strip(",."), allow)


def _early(shape, limits, allow):
    _reach.check(shape, limits, strategies.chosen("exact", allow, False), allow)


def _late(readings):
    return lambda shape, limits, allow: strategies.allocate(readings, limits, "exact", allow)


def _refused(check, shape, text, allow):
    try:
        check(shape, budgets.parse_all((text,), shape), allow)
    except HeadwiseError as error:
        return str(error)
    return ""


def test_every_option_is_read_by_some_healing_and_unread_ones_are_named():
    known = {
        name for method in ("refit", "blockwise", "distill") for name in heal.find("headwise.heal", method).OPTIONS
    }
    assert known == set(Options.__slots__)
    heal.check("distill", ("tokens=100000", "lora=2"))
    with pytest.raises(HeadwiseError, match="--heal blockwise does not read the option lora, but distill would"):
        heal.check("blockwise", ("steps=5", "lora=2"))


def test_units_that_stay_and_lengths_that_are_lowered_are_noted(model):
    assert notes(model) == []
    assert notes(model, length=4096) == ["--length 4,096 is more than the model takes; rows have 128 tokens."]
    found = notes(model, strategy="uniform", allow=("qk", "v", "depth"))
    assert found == ["depth will not be cut, though --allow names it: strategy uniform cannot for this model."]
    assert notes(model, strategy="uniform") == notes(model, portable=True, allow=("qk", "v", "bits")) == []
    assert notes(model, stream=True) == []
    (found,) = notes(model, swap_tokens=1024)
    assert "--swap-tokens 1,024 leaves none of the 1,024 calibration tokens" in found


def test_frequencies_that_move_are_known_before_a_portable_model_is_saved(model, tmp_path):
    moving = tmp_path / "moving"
    shutil.copytree(model, moving)
    config = json.loads((moving / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    (moving / "config.json").write_text(json.dumps(config))
    assert notes(model, portable=True, allow=("qk", "v")) == []
    with pytest.raises(PlanError, match="a portable plan has nothing to cut. Stock llama code can only follow cuts of"):
        notes(str(moving), portable=True, allow=("qk", "v"))


def test_short_texts_are_refused_or_noted(model, tmp_path):
    short, middle, none, packed = (tmp_path / name for name in ("short.txt", "middle.txt", "none.txt", "text.jsonl.gz"))
    short.write_text("a few words, and no more than these")
    middle.write_text(TEXT[:500])
    none.write_bytes(b"\xff\xfe\x00\x01" * 999)
    packed.write_bytes(gzip.compress(json.dumps({"words": TEXT}).encode()))
    with pytest.raises(HeadwiseError, match="fewer than one block of 64; give a longer text"):
        notes(model, data=str(short))
    with pytest.raises(HeadwiseError, match="none.txt cannot be read as text"):
        notes(model, data=str(none))
    with pytest.raises(HeadwiseError, match='no "text" field'):
        notes(model, eval=str(packed))
    packed.write_bytes(gzip.compress(b'{"text": "half a character: \\ud800"}'))
    with pytest.raises(HeadwiseError, match="holds half a character"):
        notes(model, eval=str(packed))
    with pytest.raises(HeadwiseError, match="is enough for one row only; give a longer --data, a smaller --length"):
        notes(model, data=str(middle), length=120)
    middle.write_text(TEXT[:3000])
    found = notes(model, data=str(middle), tokens=65_536)
    assert found == [f"{middle} has about 857 tokens by its size, and 66,048 are asked for."]


def texts_of(model, **asked):
    """Rows as a run has them, without a model."""
    settings = Settings(model=model, budgets=("kv=75%",), **{**SMALL, **asked})
    tokenizer = AutoTokenizer.from_pretrained(model)
    return read_texts(settings, llama, families.configuration(model), tokenizer, Causal(), None, silently)


def test_fewer_tokens_than_asked_for_are_told_exactly(model, texts, caplog):
    (texts / "small.txt").write_text(TEXT[:20_000])
    found = texts_of(model, data=str(texts / "small.txt"), tokens=65_536, eval_tokens=32_768)
    rows = len(found.calibration) + len(found.rehearsal)
    assert f"note: calibration has {64 * rows:,} of 65,536 tokens asked for." in caplog.messages
    assert f"note: evaluation has {64 * len(found.evaluation):,} of 32,768 tokens asked for." in caplog.messages


def test_a_name_with_self_in_it_is_a_file(model, texts):
    """A healing reads further text of myself.txt on a CPU, which would only not write any itself."""
    shutil.copyfile(texts / "one.txt", texts / "myself.txt")
    asked = {"heal": "blockwise", "heal_options": ("tokens=2048",)}
    assert len(texts_of(model, data=str(texts / "myself.txt"), **asked).more) == 16
    assert [own_text.writes_itself(name) for name in ("self", "a.txt+self", "myself.txt", "self.txt")] == [1, 1, 0, 0]


def test_text_that_is_calibrated_and_judged_on_is_told_and_kept(model, texts):
    one, two, other = (str(texts / f"{name}.txt") for name in ("one", "two", "other"))
    (found,) = notes(model, data=one, eval=one)
    assert "100% of its lines are also in the calibration text" in found
    (found,) = notes(model, data=one, eval=two)
    assert found.startswith(f"--eval {two}: 25% of its lines are also in the calibration text, so")
    assert notes(model, data=one, eval=other) == []
    assert texts_of(model, data=one, eval=two).described == f"{two} (25% of its lines are also in the calibration text)"
    assert texts_of(model, data=one, eval=other).described == other
    assert overlap.share("stdlib", "stdlib", 100, 100) == 1.0
    lines = texts / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"text": line}) for line in TEXT.splitlines()))
    assert overlap.share(one, str(lines), 65_536, 65_536) == 1.0, "the texts count, not how they are stored"


def test_a_full_disk_is_told_with_both_numbers(model, tmp_path, monkeypatch):
    monkeypatch.setattr(_disk, "free_bytes", lambda path: 1000)
    with pytest.raises(HeadwiseError, match=r"this run writes about [0-9.]+ [kM]B, and 1\.0 kB are free at "):
        notes(model, tmp_path / "deep" / "run")
    monkeypatch.setattr(_disk, "free_bytes", lambda path: 1_000_000)
    (found,) = notes(model, tmp_path / "deep" / "run", heal="distill")
    assert "and while it heals up to" in found and "1.0 MB are free" in found
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwiseError, match="file is a file; choose another --out"):
        notes(model, tmp_path / "file" / "run")
    assert not (tmp_path / "deep").exists()


def test_images_and_recordings_are_looked_for(tmp_path):
    with pytest.raises(HeadwiseError, match="holds no images. Give a folder of images"):
        images.peek(str(tmp_path))
    with pytest.raises(HeadwiseError, match="holds no recordings. Give a folder of .wav files"):
        audio.peek(str(tmp_path))
    with pytest.raises(HeadwiseError, match=r"pictures\.npz:test does not exist"):
        images.peek(str(tmp_path / "pictures.npz:test"))
    (tmp_path / "a.PNG").touch()
    (tmp_path / "a.WAV").touch()
    images.peek(str(tmp_path))
    audio.peek(str(tmp_path))


def kv_only(readings: Readings) -> Readings:
    """The same as probing for the cache alone leaves them: one size of every MLP, rotary pairs predicted only."""
    curves = []
    for curve in readings.curves:
        if curve.kind == "damage.mlp":
            curve = replace(curve, ticks=tuple(t[:1] for t in curve.ticks), values=tuple(v[:1] for v in curve.values))
        curves.append(replace(curve, probe="other") if curve.kind == "damage.qk_pairs" else curve)
    return replace(readings, curves=tuple(curves), model="some/model")


def test_readings_for_the_cache_alone_are_not_taken_for_all_there_is(tmp_path):
    readings = kv_only(invent(7))
    folder = RunFolder(tmp_path)
    Settings(model="some/model", budgets=("kv=75%",)).save(folder.settings_file)
    readings.save(folder.readings_file)
    again = "probe again: headwise probe some/model --budget params=95% --out NEW_FOLDER"
    for text in ("params=95%", "params=60%"):
        with pytest.raises(PlanError, match=f"{text} needs prices of MLP widths, and this probing was for the cache"):
            allocate_in(tmp_path, (text,), "exact", ("qk", "v", "mlp"), False, 0)
    with pytest.raises(PlanError, match=again):
        allocate_in(tmp_path, ("params=95%",), "uniform", ("qk", "v", "mlp"), False, 0)
    with pytest.raises(PlanError, match="needs prices of rotary pairs"):
        allocate_in(tmp_path, ("attention=95%",), "exact", ("qk", "v", "mlp"), False, 0)
    assert not folder.plan_file.exists()
    plan = allocate_in(tmp_path, ("kv=80%",), "exact", ("qk", "v", "mlp"), False, 0)
    assert frontier.solve(readings, plan, ("qk", "v", "mlp")) is not None
    limited = allocate_in(tmp_path, ("params=99%",), "exact", ("v",), False, 0)
    with pytest.raises(PlanError, match="MLP widths"):  # the report goes without, as its rivals do
        frontier.solve(readings, limited, ("qk", "v", "mlp"))
    assert write_report(folder).baselines == ()


def test_text_by_the_model_does_not_depend_on_how_many_rows_are_written_at_once(monkeypatch):
    torch.manual_seed(0)
    model = llama.tiny()
    whole = own_text.written_by(model, 6, 20, seed=3)
    assert torch.equal(own_text.written_by(model, 6, 20, seed=3, batch=1), whole)
    assert torch.equal(own_text.written_by(model, 8, 20, seed=3, batch=5)[:6], whole), (
        "more rows leave the first as they are"
    )
    assert not torch.equal(own_text.written_by(model, 6, 20, seed=4), whole)
    own = type(model).generate

    def crowded(self, prompt, **options):
        if len(prompt) > 2:
            raise torch.OutOfMemoryError
        return own(self, prompt, **options)

    monkeypatch.setattr(type(model), "generate", crowded)
    assert torch.equal(own_text.written_by(model, 6, 20, seed=3), whole), "halved until it fits"


def test_text_by_the_model_follows_its_probabilities():
    torch.manual_seed(0)
    model = llama.tiny()
    with torch.no_grad():
        logits = model(torch.tensor([[1]])).logits[0, -1].double()
    logits[model.config.eos_token_id] = -torch.inf
    found = own_text.written_by(model, 4000, 2, batch=1000)[:, 1].bincount(minlength=97) / 4000
    error = (logits.softmax(0) / 4000).sqrt()
    assert ((found - logits.softmax(0)).abs() <= 5 * error).all()


def test_progress_without_a_terminal_is_plain_lines(monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(shown.time, "monotonic", lambda: next(clock))
    with redirect_stderr(io.StringIO()) as told, shown.progress_shown() as track:
        assert list(track(range(4), "moments")) == [0, 1, 2, 3]
    assert told.getvalue().splitlines() == [
        "moments",
        "moments: 50%, about 40 s left",
        "moments: done in 1 min 40 s",
    ]
