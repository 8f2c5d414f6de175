"""Memory: estimated before work begins, less of it where it runs out, and one line where that is not enough."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from headwise import families, preflight
from headwise.checks import certificate
from headwise.cli import main
from headwise.families.llama import FAMILY as llama
from headwise.probes import _backward, fisher
from headwise.runs.settings import Settings
from headwise.stages import needed

GIB = 1 << 30
SMALL = ["--tokens", "512", "--eval-tokens", "256", "--swap-tokens", "64", "--length", "64", "--device", "cpu"]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command for a run on a tiny model and a small text."""
    path = tmp_path_factory.mktemp("source")
    tokenizer = AutoTokenizer.from_pretrained(families.locate("embedded")[0])
    llama.tiny(vocab_size=len(tokenizer)).save_pretrained(path / "tiny")
    tokenizer.save_pretrained(path / "tiny")
    (path / "text.txt").write_text(". ".join(f"word{n * n % 97} is{n % 7}" for n in range(3_000)))
    return ["run", str(path / "tiny"), "--data", str(path / "text.txt"), "--budget", "kv=40%", "--heal", "none", *SMALL]


@pytest.fixture
def eight_billion() -> LlamaConfig:
    families.register()
    return LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def stages_of(config: Any, free: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, needed.Needed]:
    monkeypatch.setattr(needed, "available_bytes", lambda _: free)
    found = needed.needed(Settings("model", ("kv=50%",), **more), config, "cuda")
    return {stage.stage: stage for stage in found}


def test_eight_billion_weights_are_estimated_at_less_than_sixty_gigabytes(
    eight_billion: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = stages_of(eight_billion, 139 * GIB, monkeypatch)
    stages = ["loading", "text by the model", "prices", "single cuts", "healing by refit", "saving", "verifying"]
    assert list(large) == stages
    assert "text by the model" not in stages_of(eight_billion, 139 * GIB, monkeypatch, data="stdlib")
    assert all(stage.device < 60 * GIB and stage.host < 24 * GIB for stage in large.values())
    assert large["prices"].way.startswith("batches of")
    words = needed.in_words(list(large.values()), "cuda")
    assert words.startswith("memory: about ") and "GB on cuda and" in words
    assert large["loading"].device == pytest.approx(2 * 8.03e9, rel=0.01), "two bytes a number"


def test_with_little_memory_layers_are_computed_twice(
    eight_billion: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, middle, large = (stages_of(eight_billion, free * GIB, monkeypatch)["prices"] for free in (20, 24, 139))
    assert small.way.startswith("layers computed twice") and small.device < 24 * GIB < large.device
    assert middle.way.startswith("batches of") and middle.device < 24 * GIB, "smaller batches come before that"


def test_a_small_model_needs_no_words() -> None:
    found = preflight.memory_needed(Settings("embedded", ("kv=25%",), device="cpu"))
    assert found and needed.in_words(found, "cpu") == ""


@pytest.mark.parametrize(
    "room, recompute, way",
    (
        (10**9, None, (4096, False)),
        (512 * 1000, None, (512, False)),
        (511 * 1000, None, (4096, True)),
        (10**9, True, (4096, True)),
        (1000, False, (512, False)),
    ),
)
def test_smaller_batches_come_before_computing_twice(room: int, recompute: bool | None, way: tuple[int, bool]) -> None:
    assert _backward.chosen_way(1000, 512, room, True, recompute) == way
    assert not _backward.chosen_way(1000, 512, room, False, recompute).recompute, "an encoder-decoder cannot"


def headwise(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headwise", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_once_is_done_again_with_less(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, tried = fisher.collect, []

    def short(*given: Any, **more: Any) -> Any:
        tried.append(given[6])
        return no_memory() if len(tried) == 1 else own(*given, **more)

    monkeypatch.setattr(fisher, "collect", short)
    headwise(monkeypatch, *asked, "--out", str(tmp_path / "run"), "--json")
    assert tried == [False, True] and "layers computed twice" in caplog.text
    stages = json.loads(capfd.readouterr().out)["memory"]
    assert [stage["stage"] for stage in stages] == ["loading", "prices", "single cuts", "saving", "verifying"]


def test_out_of_memory_for_good_ends_in_one_line_and_the_run_resumes(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(certificate, "measure", no_memory)
        assert headwise(monkeypatch, *asked, "--out", out) == 2
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert [line for line in told.splitlines() if line.startswith("error: ")] == [
        "error: too little memory; what was done is kept. Close other programs or add --recompute, and the run "
        "resumes; or start anew with --stream, or with a lower --length or --tokens."
    ]
    assert headwise(monkeypatch, *asked, "--recompute", "--out", out) in (0, 3), "it may be judged to be bad"
    told = capfd.readouterr().err
    assert "damage of bits" not in told and "writing the report" in told, "what was done is kept"


def test_a_streamed_model_is_estimated_by_its_layers(eight_billion: LlamaConfig) -> None:
    asked = Settings("model", ("kv=50%",))
    found = needed.needed(asked, eight_billion, "cuda", streamed=True)
    assert max(stage.device for stage in found) < 24 * GIB, "it fits a card on which its weights alone would hardly"
    eight_billion.num_hidden_layers = 64
    deeper = needed.needed(asked, eight_billion, "cuda", streamed=True)
    assert max(stage.device for stage in deeper) < 24 * GIB, "twice the layers take no more"


def test_a_model_that_stays_in_host_memory_is_loaded_without_threads(asked: list[str], monkeypatch: Any) -> None:
    from concurrent import futures

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")  # as Python does where there is no memory for one

    monkeypatch.setattr(futures.ThreadPoolExecutor, "submit", refuse)
    model, _ = families.load(asked[1], "cpu")
    assert model.device.type == "cpu"
    with pytest.raises(MemoryError), families.explained("model"):
        refuse()
