"""Exported models in llama.cpp, onnxruntime and OpenVINO: do they run, and do they write what transformers writes?

    python benchmarks/serving_exports.py gguf embedded shared/models/stories15M
    python benchmarks/serving_exports.py onnx embedded shared/models/stories15M
    python benchmarks/serving_exports.py openvino embedded shared/models/stories15M

`--work` keeps the small models, which are made once (kinds.py); `--kinds` limits what is tried, other rows stay.
Writes benchmarks/results/serving-ENGINE.json: for every model and kind of cut whether it runs, on
how many of 20 prompts the engine writes the same 64 tokens (a choice between two tokens whose log-probabilities differ
by less than TIE counts as the same), perplexity there and here, bytes of the file and of the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
from datetime import date
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch
from kinds import KINDS, made
from provenance import commit

import headwise
from headwise import families
from headwise.errors import HeadwiseError
from headwise.exports import _llama_cpp
from headwise.exports._graph import decoder, example
from headwise.exports._llama_check import compared, letter
from headwise.exports._onnx_graph import fed
from headwise.files.disk import write_atomically

PROMPTS, GIVEN, NEW, SCORED = 20, 16, 64, 96  # prompts, tokens in each, tokens after them, tokens of the scored row
TIE = 1e-3  # nats between two tokens of which either may be chosen
PACKAGES = {
    "gguf": ("gguf", "xllamacpp"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
RESULTS = Path(__file__).parent / "results"


def tokens_of(reader: Any) -> list[int]:
    """Tokens of a module of the standard library."""
    text = Path(json.__file__).with_name("decoder.py").read_text()
    found: list[int] = reader(text, add_special_tokens=False)["input_ids"]
    return found


def prompts_of(tokens: list[int]) -> list[list[int]]:
    """Prompts spread over a text."""
    step = (len(tokens) - GIVEN) // PROMPTS
    return [tokens[number * step : number * step + GIVEN] for number in range(PROMPTS)]


@torch.no_grad()
def ours(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers writes, greedily."""
    rows = torch.tensor(prompts)
    told = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
    found: list[list[int]] = model.generate(rows, attention_mask=torch.ones_like(rows), **told)[:, GIVEN:].tolist()
    return found


@torch.no_grad()
def same(model: Any, prompt: list[int], here: list[int], there: list[int]) -> bool:
    """Whether two continuations agree, up to a choice between two equally likely tokens."""
    place = next((n for n, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return len(here) == len(there)
    scores = model(torch.tensor([prompt + here[:place]])).logits[0, -1].log_softmax(-1)
    return float(scores[here[place]] - scores[there[place]]) < TIE


def in_llama_cpp(folder: str, model: Any, reader: Any, tokens: list[int], at: Path) -> dict[str, Any]:
    """One model as GGUF in llama.cpp."""
    try:
        found = headwise.export(folder, "gguf", out=at, check=False)
    except HeadwiseError as error:
        if "--tokenizer ids" not in str(error):
            raise
        found = headwise.export(folder, "gguf", out=at, check=False, tokenizer="ids")
    prompts, words = prompts_of(tokens), len(model.get_input_embeddings().weight)
    row = tokens[: SCORED if words < 10_000 else SCORED // 4]  # the engine tells all words' probabilities one by one
    asked: dict[str, Any] = dict(
        rows=[row], top=20, words=words, letter=letter(reader), prompts=prompts, new=NEW, on=True
    )
    answer = _llama_cpp.ask(at, 256, **asked)
    far, here, there = compared(model, row, answer["scores"][0])
    halved = _llama_cpp.ask(at, 256, cache="f16")["cache_bytes_per_token"]
    return {
        "architecture": found["architecture"], "tokenizer": found["tokenizer"], "file_bytes": found["bytes"],
        "cache_bytes_per_token": halved, "cache_filling_bytes_per_token": found["cache_filling_bytes_per_token"],
        "largest_difference": far, "perplexity": math.exp(here), "perplexity_in_engine": math.exp(there),
        "written": answer["written"],
    }  # fmt: skip


def in_onnxruntime(at: Path) -> Any:
    """Answers of onnxruntime by inputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(at / "model.onnx"), providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


def in_openvino(at: Path) -> Any:
    """Answers of OpenVINO by inputs."""
    import openvino

    ready = openvino.Core().compile_model(at / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feed: list(ready(feed).values())


def as_graph(engine: str, folder: str, model: Any, tokens: list[int], at: Path) -> dict[str, Any]:
    """One model as a graph with its cache as inputs and outputs, all prompts at once."""
    found = headwise.export(folder, engine, out=at)
    run = in_onnxruntime(at) if engine == "onnx" else in_openvino(at)
    _, family = decoder(model)
    given, rows, written = example(model, family, (PROMPTS, 1, 0)), torch.tensor(prompts_of(tokens)), []
    names = [f"{layer}.{part}" for layer in range(len(given["past"]) // 2) for part in ("key", "value")]
    for step in range(NEW):
        every = GIVEN + step
        given["input_ids"] = rows
        given["attention_mask"] = torch.ones(PROMPTS, every, dtype=torch.long)
        given["position_ids"] = torch.arange(every - rows.shape[1], every).expand(PROMPTS, -1)
        logits, *past = (torch.as_tensor(x) for x in run(fed(given, names)))
        rows = logits[:, -1].argmax(-1, keepdim=True)
        given["past"] = past
        written.append(rows)
    return {
        "file_bytes": found["bytes"], "cache_bytes_per_token": found["cache_bytes_per_token"],
        **{name: value for name, value in found["checked"].items() if name != "engine"},
        "written": torch.cat(written, 1).tolist(),
    }  # fmt: skip


def tried(engine: str, source: str, kind: str, work: Path) -> dict[str, Any]:
    """One row of the table."""
    folder = str(made(source, kind, work))
    row: dict[str, Any] = {
        "model": Path(source).name,
        "kind": kind,
        "works": False,
        "same_tokens": 0,
        "prompts": PROMPTS,
    }
    model, reader = families.load(folder)
    tokens = tokens_of(reader)
    with tempfile.TemporaryDirectory() as made_in:
        try:
            at = Path(made_in) / f"model.{engine}"
            if engine == "gguf":
                found = in_llama_cpp(folder, model, reader, tokens, at)
            else:
                found = as_graph(engine, folder, model, tokens, at)
        except HeadwiseError as error:
            return {**row, "note": " ".join(str(error).split())}
    prompts, there = prompts_of(tokens), found.pop("written")
    pairs = zip(prompts, ours(model, prompts), there, strict=True)
    agree = sum(same(model, prompt, here, its[:NEW]) for prompt, here, its in pairs)
    return {**row, "works": True, "same_tokens": agree, "note": "", **found}


def main() -> None:
    """Try every kind of the sources that are asked for; other rows of the result stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(PACKAGES))
    parser.add_argument("sources", nargs="+", help="'embedded' or folders")
    parser.add_argument("--kinds", nargs="+", default=["source", *KINDS])
    parser.add_argument("--work", type=Path, default=Path("runs/kinds"), help="where models are made")
    asked = parser.parse_args()
    path = RESULTS / f"serving-{asked.engine}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for source, kind in product(asked.sources, asked.kinds):
        new = tried(asked.engine, source, kind, asked.work) | {"date": str(date.today()), "commit": commit()}
        print(json.dumps(new), flush=True)
        rows = [row for row in rows if (row["model"], row["kind"]) != (new["model"], kind)] + [new]
        versions = {
            package: metadata.version(package) for package in ("torch", "transformers", *PACKAGES[asked.engine])
        }
        head = {"engine": asked.engine, "hardware": f"{platform.machine()} CPU, 1 thread", "versions": versions}
        write_atomically(path, json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
