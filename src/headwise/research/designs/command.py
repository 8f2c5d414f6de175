"""`headwise design`: shapes for a new model, compared, and configurations written."""

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise import devices
from headwise.errors import HeadwiseError, ModelError, OutputError
from headwise.files import disk
from headwise.research.designs import shapes
from headwise.runs.lock import output
from headwise.types import write_atomically

LABELS = {
    "parameters": "parameters",
    "train_flops_per_token": "training FLOPs per token",
    "kv_bytes_per_token": "KV bytes per token",
    "activation_bytes_per_token": "activation bytes per token",
    "worst_conditioning": "predicted conditioning",
    "estimated_train_seconds_per_million_tokens": "training, estimated (s/M)",
    "measured_train_seconds_per_million_tokens": "training, measured (s/M)",
    "estimated_prefill_seconds": "reading, estimated (ms)",
    "measured_prefill_seconds": "reading, measured (ms)",
}
NOTE = (
    "predicted conditioning: the worst layer's, Gaussian, {tokens} tokens; s/M: seconds for a million tokens; "
    "reading: {length} tokens at once.\n"
    "Predictions, not promises: train a little before you choose (headwise search)."
)
Option = typer.Option


def command(
    family: Annotated[str, Option(help="llama, gpt2, bert, vit or nystromformer.")] = "llama",
    budget: Annotated[
        list[str] | None, Option("--budget", help="params=50M, flops=20G@1k, kv=1GiB@32k, or % of --like; repeatable.")
    ] = None,
    like: Annotated[str | None, Option(help="Model whose width, vocabulary and other settings are taken over.")] = None,
    strategy: Annotated[str, Option(help=f"One or more of {', '.join(shapes.STRATEGIES)}, or all.")] = "all",
    depth: Annotated[str | None, Option(help="Layers; one number per stage with --redesign.")] = None,
    heads: Annotated[str | None, Option(help="Heads of a layer; one number per stage with --redesign.")] = None,
    width: Annotated[int | None, Option(help="Hidden size; by budget if not given.")] = None,
    vocab: Annotated[int | None, Option(help="Vocabulary; the family's own if not given.")] = None,
    length: Annotated[int, Option(help="Context length in tokens; --measure times texts of this length.")] = 1024,
    redesign: Annotated[str | None, Option(help="Rebuild a timm model with another --depth and --heads.")] = None,
    mlp_ratio: Annotated[float | None, Option(help="With --redesign: MLP width over model width.")] = None,
    measure: Annotated[bool, Option("--measure", help="Build every proposal and time training and reading.")] = False,
    device: Annotated[str, Option(help="auto, cpu, cuda.")] = "auto",
    out: Annotated[Path | None, Option(help="Folder for designs.json and one configuration per strategy.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace what is in --out.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Design a new model under a budget: shapes by strategy, what they cost, and configurations to train."""
    if redesign is not None:
        _redesign(redesign, _numbers(depth, "depth"), _numbers(heads, "heads"), mlp_ratio, out, overwrite, as_json)
        return
    wanted = _strategies(strategy)
    if out is not None:
        with output(out, "design"):
            _refuse(out, overwrite)
    from headwise.research.designs.proposals import design

    found = design(
        family,
        budget or [],
        wanted,
        like=like,
        vocab=vocab,
        length=length,
        depth=_one(depth, "depth"),
        heads=_one(heads, "heads"),
        width=width,
        device=devices.chosen(device),
        measure=measure,
    )
    _answer(found, {"family": family, "budgets": budget}, out, overwrite, as_json)


def _answer(found: list[Any], about: dict[str, Any], out: Path | None, overwrite: bool, as_json: bool) -> None:
    """Write and print the proposals."""
    text = json.dumps({**about, "length": found[0].length, "designs": [p.to_json() for p in found]}, indent=1)
    if out is not None:
        with output(out, "design"):
            _refuse(out, overwrite)
            _write(found, text + "\n", out)
    if as_json:
        typer.echo(text)
        return
    _table(found, found[0].length)
    if out is not None:
        typer.echo(f"{out}/designs.json; next: headwise train {out / found[-1].strategy} --data TEXT --out FOLDER")


def _refuse(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; give another --out.")
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise OutputError(f"{out} exists and is not empty; add --overwrite or give another --out.")


def _write(found: list[Any], text: str, out: Path) -> None:
    """Configurations and designs.json: a new folder at once, in one that holds files one after the other."""

    def fill(folder: Path) -> None:
        for proposal in found:
            disk.recover_one(folder / proposal.strategy)
            proposal.write(folder / proposal.strategy, True)
        disk.recover_one(folder / "designs.json")
        write_atomically(folder / "designs.json", text)

    fill(out) if out.exists() and any(out.iterdir()) else disk.write_folder(out, fill)


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(shapes.STRATEGIES) if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in shapes.STRATEGIES:
            raise HeadwiseError(f"no way to design is called '{name}'. Known: {', '.join(shapes.STRATEGIES)}, all.")
    return names


def _numbers(text: str | None, what: str) -> int | tuple[int, ...] | None:
    """`12`, or `1,1,5,1` for models with stages."""
    if text is None:
        return None
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise HeadwiseError(f"--{what} takes a whole number, or several with commas; '{text}' is neither.") from None
    if min(found) < 1:
        raise HeadwiseError(f"--{what} {text}: at least 1 is needed.")
    return found[0] if len(found) == 1 else found


def _one(text: str | None, what: str) -> int | None:
    found = _numbers(text, what)
    if isinstance(found, tuple):
        raise HeadwiseError(f"--{what} {text}: several numbers go with --redesign only; give one.")
    return found


def _table(found: list[Any], length: int) -> None:
    """A column per strategy, a row per size and price."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", *(proposal.strategy for proposal in found))
    layers = [proposal.shape.layers for proposal in found]
    table.add_row("layers", *(str(len(rows)) for rows in layers))
    table.add_row("width", *(str(proposal.shape.hidden_size) for proposal in found))
    table.add_row("heads x dim", *(_span([f"{x.query_heads}x{x.qk_dim}" for x in rows]) for rows in layers))
    table.add_row("MLP width", *(_span([str(x.mlp_width) for x in rows]) for rows in layers))
    for key, label in LABELS.items():
        if key in found[0].prices:
            table.add_row(label, *(_number(key, proposal.prices[key]) for proposal in found))
    table.add_row("configuration", *("tailored" if proposal.tailored else "stock" for proposal in found))
    Console().print(table)
    typer.echo(NOTE.format(tokens=shapes.TOKENS, length=length))


def _span(sizes: list[str]) -> str:
    """One size, or the first and the last layer's."""
    return sizes[0] if len(set(sizes)) == 1 else f"{sizes[0]}..{sizes[-1]}"


def _number(key: str, value: float) -> str:
    if key.endswith("prefill_seconds"):
        return f"{value * 1e3:.3g}"
    if key.endswith("conditioning") or "seconds" in key:
        return f"{value:.3g}"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _redesign(
    name: str, depth: Any, heads: Any, mlp_ratio: float | None, out: Path | None, overwrite: bool, as_json: bool
) -> None:
    """A timm model with another depth and other heads, counted beside its original."""
    if depth is None and heads is None and mlp_ratio is None:
        raise HeadwiseError("--redesign needs what should change: --depth, --heads or --mlp-ratio.")
    try:
        module = importlib.import_module("headwise.research.redesign")
        before, after = module.stock(name.removeprefix("timm:")), module.redesign(name, depth, heads, mlp_ratio, "meta")
    except ImportError as error:
        raise ModelError(f'redesigns need timm ({error}); type: pip install "headwise[timm]"') from None
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (before, after)]
    found = {
        "model": name,
        "depth": depth,
        "heads": heads,
        "mlp_ratio": mlp_ratio,
        "parameters_before": counts[0],
        "parameters_after": counts[1],
    }
    if out is not None:
        with output(out, "design"):
            if out.exists() and not overwrite:
                raise OutputError(f"{out} exists; add --overwrite or give another file with --out.")
            write_atomically(out, json.dumps(found, indent=1) + "\n")
    share = 1 - counts[1] / counts[0]
    words = f"{name}: {counts[0] / 1e6:.1f}M -> {counts[1] / 1e6:.1f}M parameters ({share:.1%} fewer)"
    typer.echo(json.dumps(found, indent=1) if as_json else words)
