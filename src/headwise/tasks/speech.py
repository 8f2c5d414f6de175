"""A recording heard, a text written: what was said in it, in its language or in another.

The text is given beside the recording, or else written by the source model itself, drawn from its own distribution.
Either way it begins as the model's own: with the tokens for its language, for what is to be done, and for no times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from headwise.data import GIVEN, NOTHING, WRITTEN, Rows, audio, marks_of
from headwise.errors import DataError, ModelError, is_out_of_memory
from headwise.families import quietly
from headwise.tasks._target import Target, padded
from headwise.tasks._task import Track

BEGINNING = 8  # tokens that are left for how a text begins
USUAL = 64  # tokens that a text is taken to have


@dataclass(frozen=True, slots=True)
class Speech(Target):
    """The text of a recording."""

    tokens: int = 1500  # of a recording
    longest: int = 448  # text
    end: int | None = None  # the token that ends a text

    name = "speech"
    unit = "nats per transcript token"

    @classmethod
    def for_model(cls, config: Any, tokenizer: Any, where: str) -> Self:
        """Lengths and the last token, by the configuration."""
        tokens, ends = config.max_source_positions, config.eos_token_id
        frames = tokens * audio.FRAMES if tokenizer is None else tokenizer.feature_extractor.nb_max_frames
        if frames != tokens * audio.FRAMES:
            raise ModelError(f"the feature extractor makes {frames} frames where the model hears {2 * tokens}.")
        return cls(tokens, config.max_target_positions, ends[0] if isinstance(ends, list) else ends)

    def read(self, source: str, reader: Any, length: int, count: int, seed: int) -> Rows:
        """Recordings of a source as `audio` names it, with their texts where those are known."""
        heard = audio.read(source, reader.feature_extractor, count, seed)
        if heard.targets is None:
            return Rows(heard.rows)
        most, ends = min(length, self.longest - BEGINNING), [] if self.end is None else [self.end]
        texts = [reader.tokenizer(text, add_special_tokens=False)["input_ids"] for text in heard.targets]
        return Rows(audio.with_tokens(heard.rows, padded([[GIVEN, *text[:most], *ends] for text in texts])))

    def block_tokens(self, length: int) -> int:
        """What a recording counts for, with its text."""
        return self.tokens + USUAL

    @torch.no_grad()
    def complete(self, model: Any, rows: torch.Tensor, seed: int, track: Track) -> torch.Tensor:
        """Rows whose texts begin as the model's do; it writes those that are not given, at temperature 1."""
        sound, given = rows[:, : self.tokens], marks_of(rows)[:, self.tokens + 1 :].long()
        random = torch.Generator(model.device).manual_seed(seed)
        texts: list[list[int]] = []
        parts = [slice(start, start + audio.BATCH) for start in range(0, len(rows), audio.BATCH)]
        for part in track(parts, "texts by the model"):
            features = audio.features_of(sound[part]).to(model.device)
            begun = self._taken(model, features)
            if given.shape[1]:
                pairs = zip(begun.tolist(), given[part], strict=True)
                texts += [[GIVEN, *start, *text[text != NOTHING].tolist()] for start, text in pairs]
                continue
            told = {"encoder_outputs": model.get_encoder()(features)}
            most = self.longest - begun.shape[1]
            texts += [[WRITTEN, *text] for text in self.drawn(model, told, begun, most, random)]
        return audio.with_tokens(sound, padded(texts))

    def _taken(self, model: Any, features: torch.Tensor) -> torch.Tensor:
        """What the model's own way of writing begins with; recordings that it does not take are refused."""
        try:
            return self._begun(model, features)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise DataError(
                f"the model does not take recordings as its processor prepares them ({error}); put the model's own "
                "processor configuration beside it."
            ) from None

    def _begun(self, model: Any, features: torch.Tensor) -> torch.Tensor:
        """What the model's own way of writing begins with; it may detect the language."""
        with quietly():
            found: torch.Tensor = model.generate(
                features, max_new_tokens=1, min_new_tokens=1, do_sample=False, num_beams=1, return_timestamps=False,
                force_unique_generate_call=True,  # returns the beginning too
            )  # fmt: skip
        return found[:, :-1]


MEANING = "a text from a recording"
AUTO = "AutoModelForSpeechSeq2Seq"
TASK = Speech
