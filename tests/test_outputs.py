"""Files that commands write outside of a run folder: whole after a kill, nothing left behind, one line if wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import exported_models as tiny
import pytest
from safetensors import SafetensorError
from test_exports import PLAIN
from typer.testing import CliRunner

import headwise
from headwise.cli import commands
from headwise.errors import ModelError, OutputError, known_reason
from headwise.exports import _beside, _llama_tokens
from headwise.fast.table import VERSION, KernelTable
from headwise.files import disk
from headwise.research.designs import configs
from headwise.runs.lock import output

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import tiny_inputs  # noqa: E402

HOLD = """
import sys
from pathlib import Path
from headwise.runs.lock import output
with output(Path(sys.argv[1]), "export"):
    print("held", flush=True)
    sys.stdin.read()
"""


def ask(*words: object) -> Any:
    return CliRunner().invoke(commands.app, list(map(str, words)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_kill_left_of_an_output_is_completed_or_deleted(tmp_path: Path) -> None:
    (tmp_path / ".headwise-tmp-a.gguf.0123abcd").mkdir()
    (tmp_path / ".headwise-tmp-a.gguf.lock").mkdir()
    (tmp_path / ".headwise-tmp-a.gguf.lock" / ".headwise-lock").write_text("{}")
    (tmp_path / ".headwise-tmp-b.gguf.0123abcd").mkdir()
    with output(tmp_path / "a.gguf", "export"):
        assert names(tmp_path) == [".headwise-tmp-a.gguf.lock", ".headwise-tmp-b.gguf.0123abcd"]
    assert names(tmp_path) == [".headwise-tmp-b.gguf.0123abcd"], "what belongs to another output stays"
    (tmp_path / ".headwise-new-c.onnx").mkdir()
    with output(tmp_path / "c.onnx", "export"):
        assert (tmp_path / "c.onnx").is_dir(), "it was finished, and is put in its place"


def test_an_output_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError), output(tmp_path / "new" / "deep" / "a.gguf", "export"):
        raise ModelError("no")
    assert names(tmp_path) == []
    with pytest.raises(OutputError, match="choose another --out"), output(Path("/dev/null"), "report"):
        pass


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    first = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=-1, stdout=-1, text=True)
    assert first.stdin and first.stdout and first.stdout.readline() == "held\n"
    with pytest.raises(OutputError, match=rf"in use by process {first.pid} .*headwise export"), output(path, "export"):
        pass
    first.communicate()
    with output(path, "export"):
        pass
    assert names(tmp_path) == []


def test_an_export_of_a_run_lies_in_it_and_nothing_of_a_killed_one(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tiny.saved(tmp_path / "run" / "model", PLAIN)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"headwise": "Settings"}))
    (tmp_path / "run" / ".headwise-tmp-model.gguf.0123abcd").mkdir()
    assert headwise.export(tmp_path / "run", "gguf", check=False)["out"] == str(tmp_path / "run" / "model.gguf")
    assert names(tmp_path / "run") == ["model", "model.gguf", "run.json"]


def test_a_model_whose_name_has_a_dot_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model-1.7B").mkdir()
    place = str(tmp_path / "model-1.7B")
    assert _beside(Path(place), place, ".gguf") == tmp_path / "model-1.7B.gguf"
    monkeypatch.chdir(tmp_path / "model-1.7B")
    assert _beside(Path("."), ".", ".gguf") == tmp_path / "model-1.7B.gguf"


def test_a_token_beyond_the_table_is_refused() -> None:
    with pytest.raises(ModelError, match="token 9, and the model's table 4 rows"):
        _llama_tokens._words({"model": {"vocab": {"a": 0, "b": 9}}}, 4)


def test_a_tokenizer_without_merges_has_one_in_the_file() -> None:
    found = _llama_tokens.vocabulary(tiny_inputs.tokenizer(), 258)
    assert found["tokenizer_pre"] == "gpt-2" and found["token_merges"], "llama.cpp loads no file without"


def test_a_design_that_was_killed_is_designed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("design", "--budget", "params=200k", "--strategy", "uniform,taper", "--vocab", 100, "--length", 64)
    write, made = configs.write, []

    def stopped(*given: Any, **named: Any) -> None:
        made.append(given[2])
        if len(made) == 2:
            raise KeyboardInterrupt
        write(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr("headwise.research.designs.proposals.configs.write", stopped)
        assert ask(*words, "--device", "cpu", "--out", tmp_path / "out").exit_code != 0
    assert len(made) == 2 and names(tmp_path) == [], "none of it is there"
    assert ask(*words, "--device", "cpu", "--out", tmp_path / "out").exit_code == 0
    assert names(tmp_path / "out") == ["designs.json", "taper", "uniform"]
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / ".headwise-tmp-taper.0123abcd").mkdir()
    assert ask(*words, "--depth", 2, "--device", "cpu", "--out", tmp_path / "out", "--overwrite").exit_code == 0
    assert names(tmp_path / "out") == ["designs.json", "notes.txt", "taper", "uniform"]


def test_nothing_is_written_into_a_folder_that_holds_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.runs.lock._take", lambda *_: pytest.fail("a lock was made"))
    for word in ("report", "reshape"):
        with pytest.raises(OutputError, match="holds no run of headwise"):
            ask_for_error(word, tmp_path)


def ask_for_error(*words: object) -> None:
    found = ask(*words).exception
    assert found is not None
    raise found


def test_names_that_no_system_takes_end_in_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headwise", "report", "é" * 300])
    with pytest.raises(SystemExit) as stop:
        commands.main()
    assert stop.value.code == 2 and "File name too long" in capsys.readouterr().err
    assert known_reason(OSError("no file and no reason")) is None, "what nobody can act on keeps its traceback"


def caused_by_memory() -> Exception:
    error = ValueError("the file could not be read")
    error.__cause__ = MemoryError()
    return error


@pytest.mark.parametrize(
    "error",
    [
        *(MemoryError(), SystemError("<built-in method join> returned NULL without setting an exception")),
        SystemError("error return without exception set"),
        *(RuntimeError("can't allocate read lock"), RuntimeError("can't start new thread")),
        *(ImportError("libm.so: failed to map segment from shared object"), caused_by_memory()),
        SafetensorError("Error while serializing: I/O error: Cannot allocate memory (os error 12)"),
    ],
    ids=lambda error: str(error)[:24] or type(error).__name__,
)
def test_too_little_memory_ends_in_one_line_wherever_it_is_noticed(
    error: Exception, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(commands, "app", fails)
    with pytest.raises(SystemExit) as stop:
        commands.main()
    told = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(told) == 1 and told[0].startswith("error: too little memory")


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise KeyError("rows")

    monkeypatch.setattr(commands, "app", fails)
    with pytest.raises(KeyError, match="rows"):
        commands.main()


@pytest.mark.parametrize("odd", [[0.5], "fast", {}, 10**400])
def test_a_damaged_table_of_kernels_is_measured_anew(odd: Any, tmp_path: Path) -> None:
    rows = {"decode": {"path": "sdpa", "ms": {"sdpa": 0.5, "own": odd}}}
    (tmp_path / "kernels.json").write_text(json.dumps({"version": VERSION, "rows": rows}))
    with pytest.warns(UserWarning, match="kernels are measured anew"):
        assert KernelTable(tmp_path / "kernels.json").rows == {}


def test_large_numbers_are_answered_at_once() -> None:
    assert ask("advise", "--width", 10**14, "--layers", 2).exit_code == 0
    found = ask("theory", "conditioning", "--tokens", 16, "--head-dim", 4, "--heads", "9" * 5000)
    assert "no list of whole numbers" in str(found.exception)


def test_a_journal_of_which_half_a_line_is_written_is_read_up_to_it(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from headwise.errors import DataError
    from headwise.research.search import study

    journal = tmp_path / "journal.log"
    study.installed().create_study(storage=study.storage_of(None, tmp_path), study_name="a")
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "wor')
    (tmp_path / "journal.log.lock0123.rename").touch()
    storage = study.storage_of(None, tmp_path)
    assert [found.study_name for found in storage.get_all_studies()] == ["a"]
    assert journal.read_bytes() == whole and names(tmp_path) == ["journal.log"]
    journal.write_bytes(b"\xff{" + whole)
    with pytest.raises(DataError, match="cannot be read .* begin another"), study._readable(journal):
        study.storage_of(None, tmp_path).get_all_studies()


def test_temporary_names_say_what_they_belong_to(tmp_path: Path) -> None:
    with disk.scratch(tmp_path / "a.json") as made:
        assert made.name.startswith(f"{disk.UNFINISHED}a.json.")
