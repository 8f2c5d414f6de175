"""vLLM in a process of its own: serves one model and answers requests on its standard input, one line of JSON each.

It is run as a file and imports nothing of Headwise: what it sees is what anybody sees who serves the folder. Answers go
to the standard output, logs of the engine to the standard error.
"""

import json
import os
import sys
import time
from typing import Any

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


class InEngine:
    """A model in the engine."""

    def __init__(self, model: str, dtype: str, cache_bytes: int, length: int, batch: int, trust: bool) -> None:
        from vllm import LLM

        self.cache_bytes = cache_bytes
        self.llm: Any = LLM(
            model, trust_remote_code=trust, dtype=dtype, max_model_len=length, max_num_seqs=batch, enforce_eager=True,
            kv_cache_memory_bytes=cache_bytes, enable_prefix_caching=False, skip_tokenizer_init=True, seed=0,
            gpu_memory_utilization=0.4,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """The engine's own numbers: version, block size, blocks, and tokens that its cache holds."""
        import vllm

        cache = self.llm.llm_engine.vllm_config.cache_config
        return {
            "version": vllm.__version__,
            "block_size": cache.block_size,
            "blocks": cache.num_gpu_blocks,
            "tokens": cache.kv_cache_size_tokens,
            "bytes_per_token": self.cache_bytes / cache.kv_cache_size_tokens,
        }

    def written(self, prompts: list[list[int]], tokens: int, logprobs: bool = True) -> list[dict[str, Any]]:
        """Greedy continuations of prompts, all in one batch, with the log-probability of every token."""
        from vllm import SamplingParams

        how = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1 if logprobs else None
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = [output.outputs[0] for output in self.llm.generate(asked, how, use_tqdm=False)]
        return [
            {
                "tokens": list(one.token_ids),
                "logprobs": [row[t].logprob for row, t in zip(one.logprobs or [], one.token_ids, strict=False)],
            }
            for one in found
        ]

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """How long the engine takes to write continuations, without asking for probabilities.

        On a CPU that is the processor's time, so that what else the machine does counts for neither model.
        """
        from vllm.platforms import current_platform

        clock = time.process_time if current_platform.is_cpu() else time.perf_counter
        start = clock()
        self.written(prompts, tokens, logprobs=False)
        return clock() - start


def main() -> None:
    """Load the model that the first line names, then answer; ends with the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    os.environ.update(SETTINGS)
    try:
        first = json.loads(sys.stdin.readline())
        if first["trust"]:  # then no plug-in helps: the folder alone must do
            os.environ["VLLM_PLUGINS"] = ""
        served = InEngine(**first)
        say(served.facts())
        for line in sys.stdin:
            request = json.loads(line)
            say(getattr(served, request.pop("do"))(**request))
    except Exception as error:  # whatever the engine says goes to whoever asked
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
