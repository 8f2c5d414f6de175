"""ONNX: one graph with the cache as inputs and outputs, for onnxruntime and whatever else reads it.

Inputs: `input_ids`, `attention_mask` (past and new tokens), `position_ids`, and `past_key_values.N.key` and `.value`
for every layer, as the cache holds them: smaller where the model was cut. Outputs: `logits`, `present.N.key` and
`present.N.value`. The first call is given a past of no tokens.
"""

from pathlib import Path
from typing import Any

from headwise.exports import _onnx_graph
from headwise.exports._asked import ExportRequest
from headwise.exports._onnx_graph import refuse as refuse
from headwise.progress import note, stage

MEANING = "a graph for onnxruntime, with the cache as inputs and outputs"
NEEDS, EXTRA, SUFFIX = ("onnx", "onnxscript"), "onnx", ".onnx"


def write(asked: ExportRequest, folder: Path) -> dict[str, Any]:
    """Write the graph with its tokenizer, run it where onnxruntime is installed, and say what it holds."""
    names, facts = _onnx_graph.write(asked, folder)
    return {**facts, "checked": _check(asked, folder / _onnx_graph.FILE, names) if asked.options.check else None}


def _check(asked: ExportRequest, path: Path, names: list[str]) -> dict[str, Any] | None:
    """How far onnxruntime's answers are from ours, with and without a past."""
    try:
        import onnxruntime
    except ImportError:
        note("the graph was not run: type pip install onnxruntime to have it checked.")
        return None
    with stage(asked.track, "running it in onnxruntime"):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = _onnx_graph.compared(asked.model, lambda feed: session.run(None, feed), names)
        return {"engine": "onnxruntime", **found}
