"""Plain text: for decoders the next token, for encoders hidden ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import DataError, ModelError
from headwise.research.train._source import Draws, TrainingRows, surprise
from headwise.research.train.settings import TrainSettings
from headwise.research.train.tokens import TokenRows, token_file

HELD_OUT = 0.05  # of the data, at most, where no text to evaluate on is given
HIDDEN, BY_MASK, BY_OTHER = 0.15, 0.8, 0.1  # of the tokens; of the hidden ones by the mask, by any other token


class NextToken(TrainingRows):
    """The next token, in rows of equal length."""

    ends = 0  # tokens around a row that are not in the file

    def __init__(self, settings: TrainSettings, tokenizer: Any, length: int, folder: Path, device: Any) -> None:
        self.row_tokens = length
        width = length - self.ends
        tokens = token_file(settings.data, tokenizer, folder / "train.bin", settings.seed, not self.ends)
        wanted = max(1, settings.eval_tokens // width)
        if settings.eval is None:
            held = min(wanted, max(1, int(len(tokens) // width * HELD_OUT)))
            cut = len(tokens) - held * width
            tokens, other = tokens[: max(0, cut)], tokens[max(0, cut) :]
        else:
            other = token_file(settings.eval, tokenizer, folder / "eval.bin", settings.seed, not self.ends)
        for name, part in ((settings.data, tokens), (settings.eval, other)):
            if len(part) < width:
                rest = " beside what is held out to evaluate on" if settings.eval is None else ""
                raise DataError(
                    f"{name or settings.data} has {len(part)} tokens{rest}, fewer than one row of {width}; "
                    "give a longer text or lower --length."
                )
        self.train, self.held = TokenRows(tokens, width, device), TokenRows(other[: wanted * width], width, device)
        self.order_on_host = self.train.rows.device.type == "cpu"
        self.train_rows, self.eval_rows = self.train.count, self.held.count

    def take(self, part: Any, rows: torch.Tensor, draws: Draws) -> Any:
        """Token rows (B, T)."""
        return part[rows]

    def scores(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Surprise at every token but the first."""
        logits = model(input_ids=batch, use_cache=False).logits
        return {"loss": surprise(logits[:, :-1], batch[:, 1:])}


class HiddenTokens(NextToken):
    """As many hidden tokens in every row: most by the mask, some by another token, some left as they are."""

    ends = 2

    def __init__(self, settings: TrainSettings, tokenizer: Any, length: int, folder: Path, device: Any) -> None:
        needed = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask")}
        if lost := [name for name, token in needed.items() if token is None]:
            raise ModelError(
                f"the tokenizer has no {lost[0]} token, which masked text needs; give another --tokenizer."
            )
        super().__init__(settings, tokenizer, length, folder, device)
        self.first, self.last, self.mask = needed.values()
        self.words = len(tokenizer)
        self.hidden = max(1, round(HIDDEN * length))
        fixed = torch.Generator(device=device).manual_seed(settings.seed)
        self.fixed_draws = self.draw(self.eval_rows, fixed)

    def draw(self, rows: int, generator: torch.Generator) -> Draws:
        """Which tokens are hidden, and by what."""
        shape = (rows, self.row_tokens)
        return tuple(torch.rand(shape, generator=generator, device=generator.device) for _ in range(3))

    def eval_draws(self, rows: torch.Tensor) -> Draws:
        """Held-out rows have the same tokens hidden every time."""
        where = rows.to(self.fixed_draws[0].device)
        return tuple(draw[where] for draw in self.fixed_draws)

    def take(self, part: Any, rows: torch.Tensor, draws: Draws) -> Any:
        """Inputs (B, T), the places of hidden tokens (B, hidden) and what they were."""
        ids = nn.functional.pad(part[rows], (1, 1), value=self.first)
        ids[:, -1] = self.last
        order, way, other = draws
        order = order.clone()
        order[:, [0, -1]] = -1.0  # the ends are never hidden
        places = order.topk(self.hidden, dim=1).indices
        labels = ids.gather(1, places)
        way, other = way.gather(1, places), (other.gather(1, places) * self.words).long()
        seen = torch.where(way < BY_MASK, self.mask, torch.where(way < BY_MASK + BY_OTHER, other, labels))
        return ids.scatter(1, places, seen), places, labels

    def scores(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Surprise at the hidden tokens."""
        ids, places, labels = batch
        logits = model(input_ids=ids).logits
        found = logits.gather(1, places.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        return {"loss": surprise(found, labels)}


def train_tokenizer(texts: Sequence[str], size: int, masked: bool) -> Any:
    """A byte-level BPE of `size` tokens; every text round-trips exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"] if masked else ["<|endoftext|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + len(special):
        raise DataError(f"a vocabulary of {size} has no room for all bytes; ask for {len(alphabet) + len(special)}.")
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    if not masked:
        end = special[0]
        return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=end, eos_token=end, pad_token=end)
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    pad, first, last, mask = special
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, cls_token=first, sep_token=last, mask_token=mask
    )
