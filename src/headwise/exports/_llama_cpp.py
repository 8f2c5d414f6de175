"""Runs a GGUF file in llama.cpp, in a process of its own: an engine that fails ends the whole process.

Needs the package xllamacpp, which holds llama.cpp and its server. `python -m headwise.exports._llama_cpp` reads what is
asked from standard input and prints what the engine answered.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from headwise.errors import ModelError

ENGINE = "xllamacpp"
SIZE = re.compile(r"(?:llama_kv_cache|KV)[^\n]*?size\s*=\s*([\d.]+) MiB\s*\(\s*(\d+) cells")
SAYS_SIZES = 4  # the least verbosity at which the engine tells how large its cache is


def installed() -> bool:
    """Whether the engine can be imported."""
    return find_spec(ENGINE) is not None


def ask(path: Path, context: int, seconds: float = 3_600, **asked: Any) -> dict[str, Any]:
    """What llama.cpp answers for a file.

    `texts`: their tokens. `rows` of tokens: for every position after the first the log-probability of the row's own
    token (of `words` in all) and those of the `top` most likely ones; `letter` is any token that is a letter.
    `prompts` of tokens: `new` tokens after each, chosen greedily, beyond an end of text if `on` is set. `cache`: f32
    or f16. Also the bytes that the engine says its cache has, by token.
    """
    question = json.dumps({"path": str(path), "context": context, **asked})
    told = [sys.executable, "-m", __name__]
    where = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        told, input=question, capture_output=True, text=True, timeout=seconds, env={**os.environ, "PYTHONPATH": where}
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower() or "assert" in line.lower()]
        raise ModelError(f"llama.cpp does not run {path.name}: {(lines or ['it ended'])[0].strip()[:300]}") from None
    sizes = [(float(size), int(cells)) for size, cells in SIZE.findall(done.stderr)]
    found["cache_bytes_per_token"] = round(sum(size * 2**20 / cells for size, cells in sizes)) if sizes else None
    return found


class _Engine:
    """A running engine."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = asked["path"], asked["context"], 1
        params.warmup, params.fit_params, params.verbosity = False, False, SAYS_SIZES
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{asked.get('cache', 'f32').upper()}")
        params.cache_type_k = params.cache_type_v = kind
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if threads := os.environ.get("OMP_NUM_THREADS"):
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
        self.server = xllamacpp.Server(params)

    def post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(content).encode()
        request = Request(self.server.listening_address + path, body, {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            return json.load(answer)

    def complete(self, prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
        greedy = {"temperature": 0, "cache_prompt": True, "return_tokens": True}
        return self.post("/completion", {"prompt": prompt, "n_predict": new, **greedy, **more})

    def scores(self, row: list[int], top: int, every: int, letter: int) -> list[dict[str, Any]]:
        """By position: the log-probability of the row's own next token, and those of the most likely ones.

        Given before any bias. The bias makes it write a letter: it is silent about tokens that are parts of one.
        """
        found = []
        for place in range(1, len(row)):
            answer = self.complete(row[:place], 1, n_probs=every, logit_bias=[[letter, 1e6]])
            given = answer["completion_probabilities"][0]["top_logprobs"]
            by_token = {each["id"]: each["logprob"] for each in given}
            best = [[each["id"], each["logprob"]] for each in given[:top]]
            found.append({"own": by_token.get(row[place]), "top": best})
        return found


def main() -> None:
    """Answer one question and end at once, without the engine's own farewell."""
    asked = json.load(sys.stdin)
    engine = _Engine(asked)
    tokens = [
        engine.post("/tokenize", {"content": text, "add_special": False})["tokens"] for text in asked.get("texts", ())
    ]
    scores = [engine.scores(row, asked["top"], asked["words"], asked["letter"]) for row in asked.get("rows", ())]
    on, new = asked.get("on", False), asked.get("new", 0)
    written = [engine.complete(prompt, new, ignore_eos=on)["tokens"] for prompt in asked.get("prompts", ())]
    print("\n" + json.dumps({"tokens": tokens, "scores": scores, "written": written}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
