"""Quantised weights on top of a cut: every kind of cut, by transformers' own quantisation configurations, on a CPU.

Perplexity of held-out text at 16, 8 and 4 bits a weight, with 95% intervals over rows, and the change against the same
model at 16 bits, paired by rows. Text is also continued greedily, from the beginnings of rows, by both. Models are made
once and kept in --work (kinds.py); packages are those of serving/weights.txt.

    python benchmarks/serving_weights.py embedded shared/models/stories15M
    python benchmarks/serving_weights.py --page docs/serving/quantisers.md
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import kinds as cut_kinds
import torch
from provenance import commit
from torch import nn

from headwise import families
from headwise.files.disk import write_atomically

RESULT = Path(__file__).parent / "results" / "serving-weights.json"
KINDS = ("source", *cut_kinds.KINDS)
PACKAGES = ("torch", "transformers", "torchao", "bitsandbytes", "hqq", "optimum-quanto", "compressed-tensors")
ROWS, LENGTH = 8, 256  # of held-out text
PROMPTS, TOKENS = 2, 8  # beginnings of rows, and tokens that are written after them
GROUP = 32  # weights that share a scale, where a format lets one choose


def torchao(bits: int) -> Any:
    """Weights of few bits, a scale for every group."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup
    from transformers import TorchAoConfig

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerGroup(GROUP)))


def bitsandbytes(bits: int) -> Any:
    """int8 by columns, or the four-bit format of QLoRA."""
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def hqq(bits: int) -> Any:
    """Half-quadratic quantisation."""
    from transformers import HqqConfig

    return HqqConfig(nbits=bits, group_size=GROUP)


def quanto(bits: int) -> Any:
    """Optimum Quanto."""
    from transformers import QuantoConfig

    return QuantoConfig(weights=f"int{bits}")


def compressed_tensors(bits: int) -> Any:
    """The format of vLLM's compressor, rounded to the nearest."""
    from transformers import CompressedTensorsConfig

    return CompressedTensorsConfig(config_groups={f"W{bits}A16": ["Linear"]}, ignore=["lm_head"])


def gptq(bits: int) -> Any:
    """GPTQ, calibrated on a few lines."""
    from transformers import GPTQConfig

    return GPTQConfig(bits=bits, group_size=GROUP, dataset=["def f(x):\n    return x\n" * 8] * 4)


ENGINES = {"torchao": torchao, "bitsandbytes": bitsandbytes, "quanto": quanto, "hqq": hqq}
ENGINES |= {"compressed-tensors": compressed_tensors, "gptq": gptq}
WORK = ("torchao", "bitsandbytes")  # on a CPU at 8 and 4 bits, with these versions


def main() -> None:
    """Measure and write, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", default=["embedded"], help="'embedded' or folders")
    parser.add_argument("--work", type=Path, default=Path("runs/kinds"), help="where models are made")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="measured; rows of others are kept")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    if asked.page:
        cut_kinds.print_page(asked.page, "weights", Path(__file__).name, table(json.loads(asked.out.read_text())))
        return
    known = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    names, methods = {Path(source).name for source in asked.sources}, ("bfloat16", *asked.engines)
    wanted = (names, asked.kinds, methods)
    rows: list[dict[str, Any]] = [row for row in known if not _measured_anew(row, *wanted)]
    for source in asked.sources:
        held_out = cut_kinds.texts(source).evaluation[:ROWS, :LENGTH]
        for kind in asked.kinds:
            for row in measured(cut_kinds.made(source, kind, asked.work), held_out, asked.engines):
                made = {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
                rows.append({"model": Path(source).name, "kind": kind, **row, **made})
                print(rows[-1], flush=True)
                write_atomically(asked.out, json.dumps(result(rows), indent=1) + "\n")


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows with what they are worth."""
    known = {name: metadata.version(name) for name in PACKAGES if _there(name)}
    return {
        "engine": "quantised weights",
        "rows": rows,
        "held_out": f"{ROWS} rows of {LENGTH} tokens",
        "group": GROUP,
        "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)",
        "versions": known,
    }


def _there(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def _measured_anew(row: dict[str, Any], names: set[str], kinds: list[str], methods: tuple[str, ...]) -> bool:
    return row["model"] in names and row["kind"] in kinds and row["method"] in methods


def measured(folder: Path, rows: torch.Tensor, engines: list[str]) -> Iterator[dict[str, Any]]:
    """The model at 16 bits, then by every engine at 8 and 4."""
    from transformers import AutoModelForCausalLM

    def loaded(**options: Any) -> Any:
        with families.quietly():
            return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()

    whole = loaded(dtype=torch.bfloat16).float()
    losses, words = nats(whole, rows), written(whole, rows)
    yield {"method": "bfloat16", "bits": 16, "works": True, "same_tokens": PROMPTS, "note": "", **about(losses, losses)}
    for engine in engines:
        for bits in (8, 4):
            told = {"method": engine, "bits": bits, "works": False, "same_tokens": 0, "prompts": PROMPTS}
            try:
                model = loaded(dtype=torch.float32, quantization_config=ENGINES[engine](bits))
                same = sum(bool(torch.equal(a, b)) for a, b in zip(words, written(model, rows), strict=True))
                yield {**told, "works": True, "same_tokens": same, "note": "", **about(nats(model, rows), losses),
                       "left_whole": left_whole(model, whole)}  # fmt: skip
            except Exception as error:  # every library raises its own kinds, which are the result
                yield {**told, "note": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def about(losses: torch.Tensor, before: torch.Tensor) -> dict[str, Any]:
    """Perplexity with its interval, and the change of the loss with its own."""
    mean, error = float(losses.mean()), float(losses.std() / len(losses) ** 0.5)
    change, change_error = float((losses - before).mean()), float((losses - before).std() / len(losses) ** 0.5)
    ends = {"low": mean - 1.96 * error, "high": mean + 1.96 * error, "perplexity": mean}
    return {
        "prompts": PROMPTS,
        **{name: float(torch.tensor(value).exp()) for name, value in ends.items()},
        "loss_change": change,
        "loss_change_error": 1.96 * change_error,
    }


def left_whole(model: nn.Module, whole: nn.Module) -> float:
    """The share of a model's weights, without its embeddings, that an engine left as they were."""
    own = dict(model.named_parameters())
    inner = {name: p for name, p in whole.named_parameters() if "embed" not in name and "lm_head" not in name}
    same = (n for n, p in inner.items() if type(own.get(n)) is nn.Parameter and own[n].shape == p.shape)
    kept = sum(inner[name].numel() for name in same if own[name].is_floating_point())
    return kept / sum(p.numel() for p in inner.values())


@torch.no_grad()
def nats(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The loss of every row."""
    return torch.stack([model(row, labels=row).loss.float() for row in rows.split(1)])


@torch.no_grad()
def written(model: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    """What a model writes after the beginnings of the first rows."""
    given = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    return [model.generate(row[None, :32], attention_mask=torch.ones(1, 32).long(), **given) for row in rows[:PROMPTS]]


def table(found: dict[str, Any]) -> list[str]:
    """One row for every model and kind, a column for every engine; then what did not work."""
    rows = found["rows"]
    columns = list(dict.fromkeys((row["method"], row["bits"]) for row in rows))
    models = list(dict.fromkeys((row["model"], row["kind"]) for row in rows))
    lines = ["| model | cut | " + " | ".join(f"{name}, {bits} bits" for name, bits in columns) + " |"]
    lines += ["| --- " * (2 + len(columns)) + "|"]
    known = {(row["model"], row["kind"], row["method"], row["bits"]): row for row in rows}
    for model, kind in models:
        cells = [_cell(known.get((model, kind, *column))) for column in columns]
        lines.append(f"| {model} | {kind} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Perplexity with its 95% interval; below it the change of the loss against 16 bits, in nats per token.",
    ]
    whole = [row["left_whole"] for row in rows if row.get("left_whole") is not None]
    if whole:
        lines += [f"Engines left at most {max(whole):.1%} of the weights outside the embeddings as they were."]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in (row for row in rows if not row["works"]):
        reasons.setdefault((row["method"], row["note"]), []).append(
            f"{row['model']}, {row['kind']}, {row['bits']} bits"
        )
    for (method, note), those in reasons.items():
        lines.append(f"- {method}: {note} ({len(those)} of them: {'; '.join(those[:2])}{' ...' if those[2:] else ''})")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines += ["", f"{found['held_out']}; {found['hardware']}, {cut_kinds.when(rows, found)}; {versions}."]
    return lines


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if not row["works"]:
        return "no"
    text = f"{row['perplexity']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
    change = f"<br>{row['loss_change']:+.4f} ± {row['loss_change_error']:.4f}"
    return text if row["bits"] == 16 else text + change


if __name__ == "__main__":
    main()
