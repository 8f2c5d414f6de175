"""Trains the embedded model, a Llama of about 6.5 million parameters, for a fixed time on one GPU.

The learning rate follows the clock: a short warm-up, a stable stretch, then a linear fall to zero over the last
30 % of the time, so that a run ends complete at `--minutes`, counted from its start, whatever the hardware's speed.

    python embedded/train.py --corpus carry/corpus --tokenizer carry/tokenizer --out DIR --minutes 8
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokens import Part, load_part
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

LENGTH = 1024
WARM_UP_STEPS = 200
DECAY = 0.3
RESERVE = 25.0  # seconds kept back for the final evaluation and the saving
GRACE = 45.0  # seconds after the time is up at which the watchdog ends the process
REPORT_EVERY = 20.0
CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,  # also the padding token, but naming it so here would keep its embedding from training
}


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal attention without a materialised mask, so that the flash kernel serves it."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # the rotation may have widened them
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def sequences(tokens: Tensor, count: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of `count` sequences of LENGTH + 1 tokens; every pass has a new order and a new offset."""
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(LENGTH + 1, device=tokens.device)
    while True:
        offset = int(torch.randint(LENGTH, (1,), generator=generator))
        passes = (len(tokens) - offset - 1) // LENGTH
        starts = (torch.randperm(passes, generator=generator) * LENGTH + offset).to(tokens.device)
        for first in range(0, passes - count + 1, count):
            yield tokens[starts[first : first + count, None] + span].long()


def loss_function(model: LlamaForCausalLM, device: str) -> Callable[[Tensor], Tensor]:
    """The mean next-token loss of a batch; compiled on a GPU, where that fuses the wide softmax."""

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    if device == "cpu":
        return loss
    torch._dynamo.config.suppress_errors = True  # a compiler's failure costs speed, not the run
    return torch.compile(loss)


def make_optimizer(model: nn.Module, rate: float, decay: float, device: str) -> torch.optim.AdamW:
    """AdamW with a strong decay of the layers' matrices, because the text is read many times; norms are left alone."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p is not embedding]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": [embedding], "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device != "cpu")


def rate_factor(step: int, fraction: float) -> float:
    """The share of the peak learning rate at a step and a fraction of the time."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, max(0.0, 1.0 - fraction) / DECAY)


@torch.no_grad()
def evaluate(loss: Callable[[Tensor], Tensor], tokens: Tensor, count: int) -> float:
    """The mean loss over the whole sequences of `tokens`, in batches of `count` (a rest is left out)."""
    total = (len(tokens) - 1) // LENGTH
    starts = torch.arange(total, device=tokens.device) * LENGTH
    span = torch.arange(LENGTH + 1, device=tokens.device)
    count = min(count, total)
    losses = [loss(tokens[starts[i : i + count, None] + span].long()) for i in range(0, total - count + 1, count)]
    return float(torch.stack(losses).mean())


def save(model: LlamaForCausalLM, tokenizer: Path, out: Path) -> None:
    """Write the model in bfloat16 with its configuration, and the tokenizer beside it."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.generation_config.pad_token_id = model.config.eos_token_id
    rounded.save_pretrained(out)
    for path in tokenizer.iterdir():
        shutil.copyfile(path, out / path.name)
    for path in out.iterdir():
        path.chmod(0o644)


def final_loss(out: Path, tokens: Tensor, device: str, count: int) -> float:
    """The validation loss of the saved (rounded) model, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(device).eval()
    torch.set_float32_matmul_precision("highest")

    def loss(batch: Tensor) -> Tensor:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return evaluate(loss, tokens, count)


class Run:
    """One training run: the model, its data, its clock and its loss curve."""

    def __init__(self, options: argparse.Namespace, train: Part, valid: Part, began: float) -> None:
        self.options, self.device = options, options.device
        self.end = began + options.minutes * 60 - RESERVE
        torch.manual_seed(options.seed)
        AttentionInterface.register("causal", causal_attention)
        config = LlamaConfig(**CONFIG)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="causal").to(self.device)
        self.loss = loss_function(self.model, self.device)
        self.optimizer = make_optimizer(self.model, options.rate, options.decay, self.device)
        self.micro = max(1, min(options.micro_tokens, options.batch_tokens) // LENGTH)
        self.parts = max(1, options.batch_tokens // (self.micro * LENGTH))
        self.train = torch.from_numpy(train.tokens.astype("int16")).to(self.device)
        self.valid = torch.from_numpy(valid.tokens.astype("int16")).to(self.device)
        self.batches = sequences(self.train, self.micro, options.seed)
        self.curve: list[dict[str, float]] = []
        self.tokens_seen = 0
        self.seconds = 0.0

    def step(self, factor: float) -> Tensor:
        """One optimiser step over a whole batch; its mean loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * factor
        total = torch.zeros((), device=self.device)
        for _ in range(self.parts):
            loss = self.loss(next(self.batches)) / self.parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens_seen += self.parts * self.micro * LENGTH
        return total

    def report(self, step: int, loss: Tensor, factor: float, start: float) -> None:
        """Print and note where the run stands, and save it in case it is cut short."""
        train_loss = float(loss)  # waits for the device
        self.seconds = time.monotonic() - start
        entry = {
            "step": step,
            "seconds": round(self.seconds, 1),
            "train_loss": round(train_loss, 4),
            "valid_loss": round(evaluate(self.loss, self.valid, self.micro), 4),
            "rate": self.options.rate * factor,
            "tokens": self.tokens_seen,
            "tokens_per_second": round(self.tokens_seen / self.seconds),
        }
        self.curve.append(entry)
        print(json.dumps(entry), flush=True)
        save(self.model, self.options.tokenizer, self.options.out)

    def fit(self) -> None:
        """Train until the time or the number of steps is up."""
        self.loss(next(self.batches)).backward()  # compiles before the schedule's clock starts
        self.optimizer.zero_grad(set_to_none=True)
        evaluate(self.loss, self.valid, self.micro)
        start = reported = time.monotonic()
        step = 0
        while True:
            now = time.monotonic()
            fraction = (now - start) / max(1.0, self.end - start)
            if step and (now >= self.end or step == self.options.steps):
                break
            factor = rate_factor(step, fraction)
            loss = self.step(factor)
            step += 1
            if step % 4 == 0 and self.device != "cpu":
                torch.cuda.synchronize()  # keeps the clock of the schedule honest
            if now - reported > REPORT_EVERY or step <= 1:
                self.report(step, loss, factor, start)
                reported = time.monotonic()
        self.report(step, loss, factor, start)


def record(run: Run, train: Part, valid: Part, loss: float) -> dict[str, object]:
    """What training.json says about the run."""
    on_gpu = run.device != "cpu"
    options = run.options
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seed": options.seed,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "minutes": options.minutes,
        "peak_rate": options.rate,
        "weight_decay": options.decay,
        "batch_tokens": run.parts * run.micro * LENGTH,
        "sequence_length": LENGTH,
        "train_tokens": len(train.tokens),
        "train_text_bytes": train.text_bytes,
        "valid_tokens": len(valid.tokens),
        "valid_text_bytes": valid.text_bytes,
        "tokens_seen": run.tokens_seen,
        "epochs": round(run.tokens_seen / len(train.tokens), 3),
        "tokens_per_second": round(run.tokens_seen / run.seconds),
        "valid_loss": loss,
        "valid_perplexity": math.exp(loss),
        "valid_bits_per_byte": loss / math.log(2) * len(valid.tokens) / valid.text_bytes,
        "curve": run.curve,
    }


def watchdog(seconds: float) -> None:
    """End the process if it outlives its time; the last report's checkpoint remains."""

    def stop() -> None:
        print("the watchdog ended the run; the last checkpoint is what remains", flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="time of the whole run")
    parser.add_argument("--steps", type=int, default=-1, help="stop after this many steps, on a part of the corpus")
    parser.add_argument("--batch-tokens", type=int, default=262_144)
    parser.add_argument("--micro-tokens", type=int, default=131_072)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--decay", type=float, default=0.8, help="weight decay of the layers' matrices")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Load the corpus, train, save, and evaluate what was saved."""
    began = time.monotonic()
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    limit = 16 * options.steps * options.batch_tokens if options.steps > 0 else None
    train = load_part(options.corpus / "train.txt.xz", options.tokenizer, limit)
    valid = load_part(options.corpus / "valid.txt.xz", options.tokenizer, limit)
    print(f"{len(train.tokens):,} + {len(valid.tokens):,} tokens after {time.monotonic() - began:.0f} s", flush=True)
    watchdog(options.minutes * 60 + GRACE - (time.monotonic() - began))
    torch.set_float32_matmul_precision("high")
    disable_progress_bar()
    run = Run(options, train, valid, began)
    run.fit()
    save(run.model, options.tokenizer, options.out)
    loss = final_loss(options.out, run.valid, run.device, min(16, run.micro))
    text = json.dumps(record(run, train, valid, loss), indent=1)
    (options.out / "training.json").write_text(text + "\n")
    (options.out / "training.json").chmod(0o644)
    print(f"validation loss {loss:.4f}, perplexity {math.exp(loss):.3f}; {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
