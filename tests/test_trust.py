"""Code runs only where it was asked for, weights are never pickles, and a machine's limits are known first."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise
from headwise import api, devices, families, machine
from headwise.checks import exactness
from headwise.errors import HeadwiseError, ModelError, PlanError
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.runtime import foreign_code

SMALL = dict(tokens=512, eval_tokens=256, swap_tokens=0, length=32, device="cpu", heal="none")
EVIL = "import pathlib\npathlib.Path({mark!r}).touch()\n"


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> Path:
    return tiny_folder


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of it."""
    out = tmp_path_factory.mktemp("runs") / "run"
    api.run(str(source), "kv=75%", out, data="stdlib", **SMALL)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def hostile(source: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model that needs its own code, and the file that appears when that code runs."""
    folder, mark = Path(shutil.copytree(source, tmp_path / "hostile")), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "own.py").write_text(EVIL.format(mark=str(mark)))
    return folder, mark


def test_the_tokenizer_of_a_cut_model_needs_no_trust(finished: Path) -> None:
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "tokenizer_without_trust.py"))
    read = [example["tokenizer_of"](str(place)) for place in (finished / "model", families.locate("embedded")[0])]
    assert read[0]("def add(a, b):")["input_ids"] == read[1]("def add(a, b):")["input_ids"]


def test_a_tampered_runtime_is_never_run(copy: Path, tmp_path: Path) -> None:
    code, mark = copy / "model" / "modeling_headwise.py", tmp_path / "ran"
    code.write_text(code.read_text() + EVIL.format(mark=str(mark)))
    with pytest.raises(PlanError, match="model is not what Headwise wrote"):
        api.verify(copy)
    found = exactness.reload_check(copy / "model", copy / "proof.safetensors", False)
    assert found.observed == "model/modeling_headwise.py is not the file Headwise wrote; it was not run"
    headwise.load(copy / "model")
    assert not mark.exists()


@pytest.mark.parametrize("other", ["other.py", "custom_generate/generate.py"])
def test_other_code_in_a_model_folder_is_never_run(copy: Path, other: str) -> None:
    (copy / "model" / other).parent.mkdir(exist_ok=True)
    (copy / "model" / other).write_text("raise SystemExit")
    found = exactness.reload_check(copy / "model", copy / "proof.safetensors", False)
    assert not found.passed and found.observed == f"model/{other} is not the file Headwise wrote; it was not run"


@pytest.mark.parametrize("named", ["elsewhere/repo--modeling_headwise.Own", "other.Own", 3, ["modeling_headwise.A"]])
def test_a_configuration_may_name_our_code_only(copy: Path, named: object) -> None:
    assert foreign_code(copy / "model") is None
    path = copy / "model" / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoModelForCausalLM": named}
    path.write_text(json.dumps(config))
    assert foreign_code(copy / "model") == "config.json"


def test_trust_in_a_file_counts_for_nothing(hostile: tuple[Path, Path], copy: Path) -> None:
    folder, mark = hostile
    path = copy / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": str(folder), "trust_remote_code": True}))
    record = copy / "finished.json"  # its inputs would tell that the model is another one
    record.write_text(json.dumps(json.loads(record.read_text()) | {"inputs": {}}))
    for command in (api.reshape, api.verify):
        with pytest.raises(ModelError, match="--trust-remote-code"):
            command(copy)
    assert not mark.exists()
    asked, before = Settings(model="m", trust_remote_code=False), Settings(model="m", trust_remote_code=True)
    assert asked.resumes(before), "a run resumes whether it was trusted or not"


def test_nothing_asks_on_standard_input(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    folder, mark = hostile
    (tmp_path / "text.txt").write_text("a b c\n" * 500)
    commands = [
        ["train", str(folder), "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "t"), "--steps", "1"],
        ["search", "--budget", "params=1M", "--tokenizer", str(folder), "--out", str(tmp_path / "s"), "--trials", "1"],
        ["run", str(folder), "--budget", "kv=75%", "--out", str(tmp_path / "r")],
    ]
    code = "import sys; from headwise.cli.commands import main\nfor words in {0!r}:\n    sys.argv[1:] = words\n"
    code += "    try: main()\n    except SystemExit as end: print(end.code)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code.format(commands)],
        input="y\n" * 50, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert all("--trust-remote-code" in error for error in errors), errors
    assert not mark.exists() and "Do you wish" not in done.stdout + done.stderr


@pytest.mark.parametrize("how", ["load", "train"])
def test_pickled_weights_are_refused_and_never_replaced_by_random_ones(source: Path, tmp_path: Path, how: str) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "m"))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no pickle is opened")
    (tmp_path / "text.txt").write_text("a b c\n" * 500)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*only safetensors and GGUF.*convert it once"):
        if how == "load":
            headwise.load(folder)
        else:
            headwise.train(str(folder), str(tmp_path / "text.txt"), tmp_path / "out", steps=1, device="cpu")


@pytest.mark.parametrize("path", ["../../outside", "/tmp", "a/b", 7])
def test_companions_of_a_model_stay_inside_its_folder(source: Path, tmp_path: Path, path: object) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "m"))
    (folder / "modules.json").write_text(json.dumps([{"path": path}]))
    with pytest.raises(ModelError, match="which is not inside"):
        families.companions(str(folder))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_before_the_folder_is_touched(source: Path, tmp_path: Path) -> None:
    for device in ("cuda", "cuda:9", "tpu", "cuda:x", ""):
        with pytest.raises(HeadwiseError, match="--device"):
            api.run(str(source), "kv=75%", tmp_path / "out", **{**SMALL, "device": device})
    assert not (tmp_path / "out").exists()
    devices.check("auto")
    devices.check("cpu")


@pytest.mark.parametrize(
    ("flags", "answer", "own", "limited"),
    [
        ("fpu amx_tile amx_bf16", -1, None, True),
        ("fpu avx512_bf16", -1, None, True),  # a sandbox that hides tiles, which CPUID still shows
        ("fpu amx_tile", 0, None, False),
        ("fpu avx2", -1, None, False),
        ("fpu amx_tile", -1, "AVX2", False),
    ],
)
def test_tiles_that_are_not_permitted_are_not_used(monkeypatch, tmp_path, flags, answer, own, limited) -> None:
    info, asked = tmp_path / "cpuinfo", []
    info.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "CPUINFO", info)
    monkeypatch.setattr(machine, "_syscall", lambda *numbers: asked.append(numbers) or answer)
    monkeypatch.delenv(machine.LIMIT, raising=False)
    if own:
        monkeypatch.setenv(machine.LIMIT, own)
    machine.settle()
    assert os.environ.get(machine.LIMIT) == (machine.WITHOUT_TILES if limited else own)
    assert asked in ([], [(158, 0x1023, 18)])


@pytest.mark.parametrize("limit", [None, "AVX512_CORE_BF16"])
def test_products_in_bfloat16_work_whatever_the_machine_permits(limit: str | None) -> None:
    code = "import headwise, torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
    environment = {name: value for name, value in os.environ.items() if name != machine.LIMIT}
    environment |= {machine.LIMIT: limit} if limit else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "64.0", done.stderr[-2000:]


def test_nothing_imports_torch_before_the_machine_is_settled() -> None:
    code = "import sys\nfrom headwise import machine\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_dossier_of_a_trusted_run_names_the_flag_again(copy: Path) -> None:
    from headwise.report._commands import how_to_make

    path = copy / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trust_remote_code": True}))
    words = how_to_make(RunFolder(copy).dossier(), "verify")
    assert f"headwise verify {copy} --trust-remote-code" in words
