"""OpenVINO's own form of the graph that ONNX has, with the same inputs and outputs."""

from pathlib import Path
from typing import Any

from headwise.exports import _onnx_graph
from headwise.exports._asked import ExportRequest
from headwise.exports._onnx_graph import refuse as refuse
from headwise.progress import stage

MEANING = "a graph for OpenVINO, with the cache as inputs and outputs"
NEEDS, EXTRA, SUFFIX = ("onnx", "onnxscript", "openvino"), "openvino", ".openvino"
FILE = "openvino_model.xml"


def write(asked: ExportRequest, folder: Path) -> dict[str, Any]:
    """Write the graph by way of ONNX, run it, and say what it holds."""
    import openvino

    names, facts = _onnx_graph.write(asked, folder)
    with stage(asked.track, "converting to OpenVINO"):
        made = openvino.convert_model(folder / _onnx_graph.FILE)
        openvino.save_model(made, folder / FILE, compress_to_fp16=False)
        for path in folder.glob(f"{_onnx_graph.FILE}*"):
            path.unlink()
    facts["bytes"] = sum((folder / FILE).with_suffix(suffix).stat().st_size for suffix in (".xml", ".bin"))
    if not asked.options.check:
        return {**facts, "checked": None}
    with stage(asked.track, "running it in OpenVINO"):
        exact = {"INFERENCE_PRECISION_HINT": "f32"}
        ready = openvino.Core().compile_model(folder / FILE, "CPU", exact)

        def run(feed: dict[str, Any]) -> list[Any]:
            found = ready(feed)
            return [found[place] for place in range(1 + len(names))]

        return {**facts, "checked": {"engine": "openvino", **_onnx_graph.compared(asked.model, run, names)}}
