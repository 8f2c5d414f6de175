"""Whether an engine serves the model of a run folder as transformers runs it, recorded beside the verdict."""

from contextlib import nullcontext

from headwise import families
from headwise.engines import compare
from headwise.errors import ModelError
from headwise.progress import Track, silently, stage
from headwise.report import for_engine
from headwise.runs.folder import RunFolder
from headwise.stages.source import Source
from headwise.types.served import Served


def refuse_coded(folder: RunFolder) -> None:
    """Refuse a cache in bits before anything is loaded: no engine holds one."""
    if any(layer.coded for layer in folder.read_plan().target.layers) and (told := for_engine(folder.dossier())):
        raise ModelError(f"{told[0]}; make a model that vLLM serves: {told[1]}")


def serve(folder: RunFolder, source: Source, engine: str, track: Track = silently) -> Served:
    """Serve the folder's model and its source by an engine, compare, and write serving.json."""
    settings, plan = folder.require(), folder.read_plan()
    prompts = compare.prompts_of(source.evaluation)
    with stage(track, "loading the new model"):
        ours, _ = families.load(str(folder.model), str(source.model.device), dtype=source.model.dtype)
    numbers = next(ours.parameters()).dtype
    where, extra = families.locate(settings.model)
    with stage(track, f"starting {engine} on the source"):
        started = compare.start_source(engine, None if extra else where, numbers, settings.trust_remote_code)
    with started[0] or nullcontext():
        found = compare.serve(engine, str(folder.model), ours.eval(), prompts, *started, not plan.portable, track)
    found.save(folder.serving_file)
    return found
