"""Models in the formats of other engines: one file for each format, found by this folder."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, ModelError, OutputError
from headwise.exports._asked import ExportOptions, ExportRequest
from headwise.files import disk
from headwise.progress import Track, silently, stage
from headwise.registry import find
from headwise.runs.folder import RunFolder
from headwise.runs.lock import output

FACTS = "export.json"  # in a folder that was exported: what it is


def export(
    folder: Path | str,
    to: str,
    out: Path | str | None = None,
    overwrite: bool = False,
    track: Track = silently,
    **options: Any,
) -> dict[str, Any]:
    """Write a model in the format of another engine, and say what was written.

    `folder` is a run folder, the folder of a model, or any name that `headwise.load` takes; `to` is gguf, onnx or
    openvino. Options: `type`, the number format of weights; `tokenizer`, "ids" for a file that takes token numbers
    only; `check`, whether the file is run where its engine is installed.
    """
    plug_in = find("headwise.exports", to)
    chosen = ExportOptions(**options)
    plug_in.refuse(chosen)
    for package in plug_in.NEEDS:
        if find_spec(package) is None:
            raise HeadwiseError(f'--to {to} needs the package {package}; type: pip install "headwise[{plug_in.EXTRA}]"')
    with _held(folder):
        model = model_of(folder)
        path = Path(out) if out else _beside(Path(folder), model, plug_in.SUFFIX)
        found: dict[str, Any] = {"out": str(path), "format": to, "source": model}
        with output(path, "export"):
            _refuse(path, model, overwrite, plug_in.SUFFIX)
            with stage(track, "loading the model"):
                from headwise import families

                loaded, reader = families.load(model)
            asked = ExportRequest(model, loaded, reader, chosen, track)
            if plug_in.SUFFIX == ".gguf":
                disk.write_file(path, lambda new: found.update(plug_in.write(asked, new)))
            else:
                disk.write_folder(path, lambda new: _fill(new, found, plug_in.write(asked, new)))
    return {**found, "options": asdict(chosen)}


def _held(folder: Path | str) -> AbstractContextManager[None]:
    """Keep commands out of a run folder that would replace its model meanwhile; one that is read-only has none."""
    run = RunFolder(folder)
    ours = run.path.is_dir() and os.access(run.path, os.W_OK) and run.is_ours()
    return run.held("export") if ours else nullcontext()


def model_of(folder: Path | str) -> str:
    """The model of a run folder; the name of any other model as it is."""
    run = RunFolder(folder)
    if not Path(folder).is_dir() or not run.is_ours():
        return str(folder)
    if not run.model.is_dir():
        raise ModelError(f"{folder} holds no model yet; type: headwise heal {folder}")
    return str(run.model)


def _beside(folder: Path, model: str, suffix: str) -> Path:
    """Where an export goes if nothing is said: into a run folder, or beside the folder of a model."""
    if Path(model) != folder:
        return folder / f"model{suffix}"
    if folder.is_dir():
        return folder.resolve().with_name(folder.resolve().name + suffix)  # a name such as model-1.7B is kept whole
    return (folder if folder.exists() else Path(folder.name)).with_suffix(suffix)


def _refuse(path: Path, model: str, overwrite: bool, suffix: str) -> None:
    """Refuse what would write over a source or over something else."""
    source = Path(model)
    if source.exists() and path.resolve().is_relative_to(source.resolve()):
        raise OutputError(f"{path} lies in the source model's folder, which is never written; choose another --out.")
    if not path.exists():
        return
    if not overwrite:
        raise OutputError(f"{path} exists; add --overwrite to replace it, or choose another --out.")
    if path.is_dir() and (suffix == ".gguf" or not (path / FACTS).is_file()):
        raise OutputError(f"{path} is a folder that no export wrote; choose another --out.")
    if path.is_file() and suffix != ".gguf":
        raise OutputError(f"{path} is a file, and a folder is to be written; choose another --out.")


def _fill(new: Path, found: dict[str, Any], facts: dict[str, Any]) -> None:
    found.update(facts)
    (new / FACTS).write_text(json.dumps(found, indent=1) + "\n")


def in_words(found: dict[str, Any]) -> str:
    """What was written, for a reader."""
    told = [f"{found['out']}: {found['format']}, {found['bytes']:,} bytes"]
    if "architecture" in found:
        told[0] += f", architecture {found['architecture']}, {found['type']}"
    cache = f"cache: {found['cache_bytes_per_token']:,} bytes per token"
    if filled := found.get("cache_filling_bytes_per_token"):
        cache += f", of which {filled:,} are zeros, because all layers must be alike there"
    told.append(cache)
    if checked := found["checked"]:
        far = f"log-probabilities differ from ours by at most {checked['largest_difference']:.1e}"
        if "codes" in checked:
            share = f"{checked['codes_that_differ']:,} of {checked['codes']:,}"
            far += f" where codes are equal; rounding moved {share} codes, and by up to "
            far += f"{checked['largest_difference_as_run']:.1e} with those"
        told.append(f"run in {checked['engine']}: {far}")
    return "\n".join(told)
