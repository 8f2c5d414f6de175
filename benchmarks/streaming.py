"""How much memory a 7B model takes when it is streamed, how long each stage takes, and whether anything else changes.

    python benchmarks/streaming.py                  # all parts; 14 GB and as much again of disk in --work, one hour
    python benchmarks/streaming.py --parts small    # only: small, wide, whole

`whole` makes a checkpoint in the shape of Llama-2-7B from random bf16 weights, shard by shard, and cuts a quarter of
its cache in a child process whose peak resident memory is recorded: probe, allocate, reshape, save, then verify. Few
tokens: memory does not depend on their number beyond a batch of 4,096, which `wide` reads, on two such layers, with and
without the refit. `small` compares streamed results with those of the path in memory, bit by bit. Writes
`benchmarks/results/streaming.json`. What plans for streamed models lose is measured by streamed_bits.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "streaming.json"
PROMISED_GB = 4.0
LLAMA_7B = dict(
    hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32, num_hidden_layers=32,
    vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
FEW = dict(tokens=256, eval_tokens=64, swap_tokens=32, length=32)  # of the whole model
BATCH = dict(tokens=4_608, eval_tokens=512, swap_tokens=512, length=512)  # a full batch to calibrate on
SMALL = dict(tokens=4_096, eval_tokens=1_024, swap_tokens=512, length=128)
ALLOW = ("qk", "v", "mlp")  # figures are about dimensions


def make(folder: Path, layers: int, shape: dict[str, Any] = LLAMA_7B) -> None:
    """A checkpoint of random weights; one layer of it is in memory at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from headwise import families

    folder.mkdir(parents=True)
    config = LlamaConfig(**{**shape, "num_hidden_layers": layers}, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(name.split(".")[2] if ".layers." in name else name, []).append(name)
    pool = torch.empty(1 << 26).normal_(std=0.02, generator=torch.Generator().manual_seed(0)).bfloat16()
    places, start = {}, 0
    for number, names in enumerate(groups.values(), 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for name in names:
            size, places[name] = shapes[name].numel(), file
            start = (start + 9_999_991) % len(pool)  # every tensor begins elsewhere in the drawn numbers
            drawn = torch.cat([pool[start:], *[pool] * (1 + size // len(pool))])[:size]
            tensors[name] = torch.ones_like(drawn) if len(shapes[name]) == 1 else drawn.view(shapes[name])
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / name, folder / name)


def stages(model: str, out: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Every stage of a streamed run in this process: its seconds, and the peak of resident memory so far."""
    import resource

    from headwise import pipeline
    from headwise.runs.folder import RunFolder
    from headwise.runs.settings import Settings
    from headwise.stream.source import load_streaming
    from headwise.types import Plan

    asked, folder = (
        Settings(model, ("kv=75%",), device="cpu", stream=True, data="stdlib", allow=ALLOW, **settings),
        RunFolder(out),
    )
    folder.claim(asked, model)
    seconds, peaks = {}, {}
    bench = load_streaming(asked)

    def allocate() -> None:
        limits = pipeline.budgets_of(asked, bench)
        folder.write_plan(pipeline.allocate(asked, bench, bench.probe(asked, folder).readings, limits))

    for name, stage in (
        ("probe", lambda: bench.probe(asked, folder)),
        ("allocate", allocate),
        ("reshape, heal, save", lambda: pipeline.carry_out(asked, folder, bench, Plan.read(folder.plan_file))),
        ("verify", lambda: pipeline.verify(folder, bench)),
    ):
        start = time.perf_counter()
        stage()
        seconds[name] = time.perf_counter() - start
        peaks[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(name, f"{seconds[name]:.0f} s, {peaks[name] / 1e9:.2f} GB", file=sys.stderr, flush=True)
    verdict = json.loads(folder.verdict_file.read_text())
    checks = {check["name"]: check["passed"] for check in verdict["checks"]}
    return {"seconds": seconds, "peak_bytes": peaks, "size": verdict["size"], "checks": checks}


def in_child(work: Path, name: str, layers: int, settings: dict[str, Any]) -> dict[str, Any]:
    """`stages` of a fresh checkpoint in a process of its own."""
    model = work / f"model-{layers}"
    if not model.exists():
        make(model, layers)
    run = work / name
    code = (
        "import json, sys; from benchmarks.streaming import stages; "
        "print('RESULT' + json.dumps(stages(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # some CPUs die on large bf16 products
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(run), json.dumps(settings)],
        stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    found: dict[str, Any] = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))[6:])
    files = sorted(model.glob("*.safetensors"))
    found |= {"settings": settings, "layers": layers, "checkpoint_bytes": sum(f.stat().st_size for f in files)}
    shutil.rmtree(run)
    return found


def whole(work: Path) -> dict[str, Any]:
    """The 7B model."""
    found = in_child(work, "whole", LLAMA_7B["num_hidden_layers"], {**FEW, "heal": "none"})
    shutil.rmtree(work / f"model-{LLAMA_7B['num_hidden_layers']}")
    return found


def wide(work: Path) -> dict[str, Any]:
    """Two of its layers, full batches."""
    found = {heal: in_child(work, f"wide-{heal}", 2, {**BATCH, "heal": heal}) for heal in ("none", "refit")}
    shutil.rmtree(work / "model-2")
    return found


def small(work: Path) -> dict[str, Any]:
    """The embedded model, streamed and in memory with the same plan: how far moments and tensors are apart."""
    import torch
    from safetensors.torch import load_file

    from headwise import families, pipeline
    from headwise.cuts import reshape, save
    from headwise.heal.refit import refit
    from headwise.probes import gram
    from headwise.runs.folder import RunFolder
    from headwise.runs.settings import Settings
    from headwise.stream._store import read_tensors
    from headwise.stream.probe import moments_file
    from headwise.stream.source import load_streaming
    from headwise.types import Plan

    asked = Settings("embedded", ("kv=75%",), device="cpu", stream=True, data="stdlib", allow=ALLOW, **SMALL)
    folder = RunFolder(work / "small")
    folder.claim(asked, "embedded")
    bench = load_streaming(asked)
    pipeline.build(asked, folder, bench)
    model, tokenizer = families.load("embedded")
    family = families.family_of(model.config)
    source = family.tailor(model)
    moments = [
        {name: tensor.float().double() for name, tensor in layer.items()}
        for layer in gram.collect(family, source, bench.calibration, False)
    ]
    streamed = [read_tensors(moments_file(folder.streaming, i)) for i in range(len(moments))]
    apart = max(float((a[n] - b[n]).abs().max()) for a, b in zip(moments, streamed, strict=True) for n in b)
    cut = reshape(family, source, Plan.read(folder.plan_file), moments)
    healed, _ = refit(family, source, cut, bench.calibration)
    save(family, healed, tokenizer, work / "in-memory", False)
    ours = {n: t for f in folder.model.glob("*.safetensors") for n, t in load_file(f).items()}
    theirs = {n: t for f in (work / "in-memory").glob("*.safetensors") for n, t in load_file(f).items()}
    differ = {n: float((ours[n].float() - theirs[n].float()).abs().max()) for n in theirs}
    same = set(ours) == set(theirs) and all(torch.equal(ours[n], theirs[n]) for n in theirs)
    for path in (folder.path, work / "in-memory"):
        shutil.rmtree(path)
    found = {"bit_equal": same and apart == 0, "moments_apart": apart, "tensors_apart": max(differ.values())}
    return {**found, "tensors": len(theirs), "settings": SMALL, "healing": "refit"}


def section(result: dict[str, Any]) -> str:
    """The result in Markdown; parts that were not run are left out."""
    parts = {"whole": _whole, "wide": _wide, "small": _small}
    told = [tell(result[name]) for name, tell in parts.items() if name in result]
    end = f"{result['machine']}, {result['date']}, torch {result['versions']['torch']}."
    return "\n\n".join(["## Models larger than memory (`benchmarks/streaming.py`)", *told, end]) + "\n"


def _whole(found: dict[str, Any]) -> str:
    size, settings = found["size"], found["settings"]
    kept = size["kv_bytes_per_token_after"] / size["kv_bytes_per_token_before"]
    rows = [f"| {n} | {s:.0f} | {found['peak_bytes'][n] / 1e9:.2f} GB |" for n, s in found["seconds"].items()]
    most = max(found["peak_bytes"].values()) / 1e9
    said = (
        f"A checkpoint in the shape of Llama-2-7B ({size['parameters_before'] / 1e9:.2f}B parameters, "
        f"{found['checkpoint_bytes'] / 1e9:.1f} GB of random bf16 weights) to {kept:.0%} of its cache with "
        f"`--stream --heal none`: "
        f"peak resident memory {most:.2f} GB (promised: at most {PROMISED_GB:g}). One run, {settings['tokens']} tokens "
        f"of calibration, {settings['eval_tokens']} of evaluation, {settings['swap_tokens']} for gains."
    )
    return "\n".join([said, "", "| stage | seconds | peak memory so far |", "| --- | --- | --- |", *rows])


def _wide(found: dict[str, Any]) -> str:
    peaks = {heal: max(part["peak_bytes"].values()) / 1e9 for heal, part in found.items()}
    return (
        f"With a full batch of 4,096 tokens (two such layers): {peaks['none']:.2f} GB without healing, "
        f"{peaks['refit']:.2f} GB with the refit."
    )


def _small(found: dict[str, Any]) -> str:
    equal = "equal to the bit" if found["bit_equal"] else f"apart by at most {found['tensors_apart']:.1e}"
    return (
        "The embedded model, streamed and refitted, against the path in memory with the same plan: moments and all "
        f"{found['tensors']} tensors are {equal}."
    )


def main() -> None:
    """Run the parts that are asked for; others keep their committed results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=["small", "wide", "whole"])
    parser.add_argument("--work", type=Path, help="folder for checkpoints; a temporary one if not given")
    arguments = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="streaming-") as scratch:
        for name in arguments.parts:
            result[name] = {"small": small, "wide": wide, "whole": whole}[name](Path(scratch))
            print(name, json.dumps(result[name]), file=sys.stderr, flush=True)
            import torch

            threads = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
            result |= {
                "machine": f"{platform.machine()} CPU, {threads} threads, shared with other work",
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "versions": {p: metadata.version(p) for p in ("torch", "transformers", "safetensors")},
                "repeats": 1,
            }
            RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
