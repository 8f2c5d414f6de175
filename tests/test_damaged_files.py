"""Every file that is read may be damaged: whatever is in its place, a command ends well or in one line of ours."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import failing
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headwise import api, cli, families
from headwise.checks import _fresh, speed
from headwise.errors import HeadwiseError, ModelError, PlanError
from headwise.files import tensors
from headwise.files.json import DEEPEST, read_json
from headwise.runs.folder import RunFolder
from headwise.runs.healing import read_healing
from headwise.runs.moments import read_moments
from headwise.runs.settings import Settings
from headwise.stages import frontier
from headwise.training import checkpoint
from headwise.types import Plan, Readings, Verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import mutations as damage  # noqa: E402

SMALL = dict(tokens=1024, eval_tokens=256, swap_tokens=64, length=32, device="cpu", heal="none", data="text.txt")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text, a tiny model with a tiny tokenizer, and a finished run of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    home, rng = tmp_path_factory.mktemp("home"), random.Random(0)
    lines = [" ".join(rng.choice(("the", "cat", "dog", "sat", "on", "a")) for _ in range(12)) for _ in range(300)]
    (home / "text.txt").write_text("\n".join(lines))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=90, special_tokens=["<s>", "</s>"]))
    family = next(f for f in families.known() if "llama" in f.model_types)
    with families.quietly(), pytest.MonkeyPatch.context() as patch:
        family.tiny("llama").save_pretrained(home / "source")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
        tokenizer.save_pretrained(home / "source")
        patch.chdir(home)
        patch.setattr(frontier.solve, "__defaults__", (None, 0.2))
        api.run("source", ("kv=75%", "params=100%"), "run", **SMALL)
    yield home


@pytest.fixture
def copied(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that, in which commands run; slow parts of them that read no file are left out."""
    monkeypatch.chdir(shutil.copytree(home, tmp_path / "home"))
    monkeypatch.setattr(frontier.solve, "__defaults__", (None, 0.2))
    monkeypatch.setattr(speed, "measure", lambda *given, **more: {})
    monkeypatch.setattr(_fresh.subprocess, "Popen", failing("not started"))
    return tmp_path / "home"


def ends_well(*words: str) -> None:
    """Run a command; nothing but our own errors may end it early."""
    found = CliRunner().invoke(cli.app, list(words)).exception
    if found is not None and not isinstance(found, (HeadwiseError, SystemExit)):
        raise AssertionError(f"headwise {' '.join(words)}") from found


PROBE = (
    "probe",
    "source",
    "--out",
    "out",
    "--data",
    "text.txt",
    "--tokens",
    "1024",
    "--swap-tokens",
    "0",
    "--length",
    "32",
)
PROBE = (*PROBE, "--device", "cpu", "--overwrite")
REPORT, VERIFY, RESHAPE = ("report", "run"), ("verify", "run"), ("reshape", "run")
ALLOCATE = ("allocate", "run", "--budget", "kv=80%")
CASES: list[tuple[str, tuple[str, ...], int]] = [  # file, command, mutations
    ("run/run.json", REPORT, 6),
    ("run/run.json", ALLOCATE, 4),
    ("run/readings.json", ALLOCATE, 10),
    ("run/readings.json", REPORT, 6),
    ("run/plan.json", REPORT, 8),
    ("run/plan.json", RESHAPE, 4),
    ("run/moments.safetensors", RESHAPE, 6),
    ("run/heal.json", REPORT, 6),
    ("run/heal.json", VERIFY, 3),
    ("run/verdict.json", REPORT, 8),
    ("run/verdict.json", ("show", "run/verdict.json"), 6),
    ("run/frontier.json", REPORT, 6),
    ("run/proof.safetensors", VERIFY, 3),
    ("run/model/config.json", VERIFY, 4),
    ("run/model/model.safetensors", VERIFY, 3),
    ("source/config.json", PROBE, 6),
    ("source/model.safetensors", PROBE, 4),
    ("source/tokenizer.json", PROBE, 4),
    ("source/tokenizer_config.json", PROBE, 3),
    ("source/generation_config.json", PROBE, 2),
]


@pytest.mark.parametrize(("name", "words", "count"), CASES, ids=[f"{name} {words[0]}" for name, words, _ in CASES])
def test_a_damaged_file_ends_in_one_line_or_does_no_harm(
    copied: Path, name: str, words: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied / name
    if path.stem not in ("readings", "plan"):  # all that rivals are solved from
        monkeypatch.setattr(frontier, "rivals", lambda *given: ())
    content = path.read_bytes()
    for said, damaged in damage.mutations(0, damage.kind_of(path), content, count):
        path.write_bytes(damaged)
        try:
            ends_well(*words)
        except AssertionError as error:
            raise AssertionError(f"{name}: {said}") from error


@pytest.mark.parametrize("place", damage.PLACES)
def test_whatever_stands_where_a_file_was_nothing_hangs(copied: Path, place: str) -> None:
    readers: dict[str, Callable[[Path], Any]] = {
        "run/run.json": Settings.read,
        "run/readings.json": Readings.read,
        "run/plan.json": Plan.read,
        "run/verdict.json": Verdict.read,
        "run/heal.json": read_healing,
        "run/moments.safetensors": tensors.read,
        "source/config.json": lambda path: families.load(str(path.parent)),
        "source/tokenizer.json": lambda path: families.load(str(path.parent)),
        "source/model.safetensors": lambda path: families.load(str(path.parent)),
    }
    for name, read in readers.items():
        damage.put(copied / name, place)
        with pytest.raises(HeadwiseError):
            read(copied / name)


@pytest.mark.parametrize("name", ["source/README.md", "run/model/README.md", "run/notes.txt"])
def test_a_pipe_in_a_folder_is_refused_before_it_is_read(copied: Path, name: str) -> None:
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    with pytest.raises(HeadwiseError, match=f"{name} is neither a file nor a folder"):
        families.load("source") if name.startswith("source") else api.verify("run")


def test_a_file_without_permission_is_named(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PlanError, match=r"plan\.json cannot be read \(Permission denied\)"):
        Plan.read(copied / "run" / "plan.json")


@pytest.mark.parametrize("deep", [DEEPEST + 2, 900, 100_000])
def test_deep_nesting_is_told(tmp_path: Path, deep: int) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * deep + "]" * deep)
    with pytest.raises(PlanError, match="nested"):
        read_json(path)
    path.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert read_json(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"method": None}, "method must be str, not None; run headwise heal again"),
        ({"method": ["refit"]}, r"method must be str, not \['refit'\]"),
        ({"rehearsed": "low"}, "rehearsed must be float, not 'low'"),
        ({"rehearsed": float("nan")}, "rehearsed is nan, not a finite number; run headwise heal again"),
        ({"layers": {"0": 1}}, "layers must be a list"),
    ],
)
def test_a_damaged_record_of_healing_is_told(copied: Path, change: dict[str, Any], told: str) -> None:
    path = copied / "run" / "heal.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError, match=told):
        read_healing(path)
    assert RunFolder(copied / "run").dossier().verdict is None, "what was verified had another record"


def changed(path: Path, *keys: Any, to: Any) -> None:
    """Set one value in a JSON file."""
    data = json.loads(path.read_text())
    inside = data
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = to
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("keys", "to", "told"),
    [
        (("orders", 0, "kv_heads", 0, 0), 99, "must order"),
        (("orders",), [], "orders has 0 layers"),
        (("curves", 0, "values", 0, 0), float("nan"), "not a finite number"),
        (("curves", 0, "ticks", 0, 0), 10**9, "sizes of layer 0"),
        (("curves", 0, "ticks"), [[1]], "different lengths"),
        (("shape", "layers"), [], "at least one layer"),
        (("shape", "grain", "v_step"), 0, "v_step is 0"),
        (("shape", "layers", 0, "mlp_width"), 10**12, "sizes are at most"),
        (("tokens",), 10**30, "none is that large"),
    ],
)
def test_readings_that_fit_no_model_are_refused_at_reading(copied: Path, keys: tuple, to: Any, told: str) -> None:
    path = copied / "run" / "readings.json"
    changed(path, *keys, to=to)
    with pytest.raises(HeadwiseError, match=told):
        Readings.read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 100_000), ("num_hidden_layers", -1), ("hidden_size", "64"), ("hidden_size", 1 << 30),
     ("num_attention_heads", 0), ("num_attention_heads", 3), ("vocab_size", None), ("dtype", "nonsense"),
     ("attn_implementation", "somebody/kernel"), ("intermediate_size", 4_000_000),
     ("attention_dropout", 10**400), ("attention_dropout", 7), ("max_position_embeddings", 0)],
)  # fmt: skip
def test_sizes_that_no_model_has_are_refused_before_it_is_built(copied: Path, field: str, value: Any) -> None:
    changed(copied / "source" / "config.json", field, to=value)
    with pytest.raises(HeadwiseError):
        families.load("source")


@pytest.mark.parametrize("name", ["0.gram_q", "0.k_basis", "0.v_near"])
@pytest.mark.parametrize("harm", ["truncated", "missing", "shape", "nan", "integers", "name"])
def test_damaged_moments_say_to_probe_again(copied: Path, harm: str, name: str) -> None:
    path = copied / "run" / "moments.safetensors"
    layers = Plan.read(copied / "run" / "plan.json").source.layers
    found = load_file(path)
    if harm == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        tensor = found.pop(name)
        other = {
            "shape": tensor[..., :1].repeat(2, *[1] * (tensor.dim() - 1)),
            "nan": tensor * float("nan"),
            "integers": tensor.long(),
        }
        found |= {name: other[harm]} if harm in other else {"x.gram_q": tensor} if harm == "name" else {}
        save_file(found, path)
    with pytest.raises(PlanError, match=r"moments\.safetensors.*probe again"):
        read_moments(path, "cpu", layers)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_weights_that_are_no_numbers_are_told(copied: Path, value: float) -> None:
    path = copied / "source" / "model.safetensors"
    found = load_file(path)
    name = next(name for name in found if name.endswith("down_proj.weight"))
    found[name][0, 0] = value
    save_file(found, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="is damaged: .*down_proj.weight holds values"):
        families.load("source")


@pytest.mark.parametrize(("field", "value"), [("v_width", 10**9), ("v_dim", 1)])
def test_a_plan_that_does_not_fit_its_model_is_refused(copied: Path, field: str, value: int) -> None:
    changed(copied / "run" / "plan.json", "target", "layers", 1, field, to=value)
    found = CliRunner().invoke(cli.app, list(RESHAPE)).exception
    assert isinstance(found, HeadwiseError), found


def test_a_diagnosis_that_is_no_number_is_shown(copied: Path) -> None:
    path = copied / "run" / "readings.json"
    kinds = [curve["kind"] for curve in json.loads(path.read_text())["curves"]]
    other = next(number for number, kind in enumerate(kinds) if not kind.startswith("damage."))
    changed(path, "curves", other, "values", 0, 0, to=float("nan"))
    assert CliRunner().invoke(cli.app, ["show", "run/readings.json"]).exit_code == 0


def test_a_tokenizer_of_another_model_is_told(copied: Path) -> None:
    shutil.copyfile(Path(families.locate("embedded")[0]) / "tokenizer.json", copied / "source" / "tokenizer.json")
    with pytest.raises(HeadwiseError, match="the tokenizer gives token"):
        api.probe("source", "out", **{**SMALL, "swap_tokens": 0})


def test_a_damaged_checkpoint_names_itself(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state: Any = SimpleNamespace(sums=torch.zeros(2), step=1, summed=0, seconds=0.0, curve=[])
    state.optimiser = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path, model, state)
    checkpoint.restore(tmp_path, model, state)
    path = checkpoint.all_in(tmp_path)[0] / "state.json"
    point = '{"step": 1, "loss": {}, "gradient_norm": 0, "rate": 0, "seconds": 0}'
    for text in (
        *("{}", "[", '{"step": "x", "summed": 0, "seconds": 0, "curve": []}'),
        '{"step": 1, "summed": 0, "seconds": 0, "curve": [' + point + "]}",
    ):
        path.write_text(text)
        with pytest.raises(HeadwiseError, match=r"step-00000001 is damaged"):
            checkpoint.restore(tmp_path, model, state)
