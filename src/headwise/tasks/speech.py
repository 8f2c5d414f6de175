"""Speech recognition and translation: a recording in, its transcript or translation out.

The text is given with the recording, or sampled from the source model. Either way it begins with the model's own tokens
for the language, the task and no timestamps.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch

from headwise.data import GIVEN, NOTHING, WRITTEN, DataRows, audio, marks_of
from headwise.errors import DataError, ModelError, is_out_of_memory
from headwise.families import quietly
from headwise.tasks._target import Target, padded
from headwise.tasks._task import Track

BEGINNING = 8  # tokens that are left for how a text begins
USUAL = 64  # tokens that a text is assumed to have


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

    def read(self, source: str, reader: Any, length: int, count: int, seed: int) -> DataRows:
        """Recordings of a source, with their transcripts where those are known."""
        found = audio.read(source, reader.feature_extractor, count, seed)
        if found.targets is None:
            return DataRows(found.rows)
        most, ends = min(length, self.longest - BEGINNING), [] if self.end is None else [self.end]
        texts = [reader.tokenizer(text, add_special_tokens=False)["input_ids"] for text in found.targets]
        return DataRows(audio.with_tokens(found.rows, padded([[GIVEN, *text[:most], *ends] for text in texts])))

    def block_tokens(self, length: int) -> int:
        """Tokens of a recording and its transcript."""
        return self.tokens + USUAL

    @torch.no_grad()
    def complete(self, model: Any, rows: torch.Tensor, seed: int, track: Track) -> torch.Tensor:
        """Rows whose texts begin with the model's own tokens; texts that are not given are sampled at temperature 1."""
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
            encoded = {"encoder_outputs": model.get_encoder()(features)}
            most = self.longest - begun.shape[1]
            texts += [[WRITTEN, *text] for text in self.drawn(model, encoded, begun, most, random)]
        return audio.with_tokens(sound, padded(texts))

    def _taken(self, model: Any, features: torch.Tensor) -> torch.Tensor:
        """The tokens that the model's own texts begin with; recordings that it does not accept are refused."""
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
        """The tokens that the model's own texts begin with; the model may detect the language."""
        with quietly():
            found: torch.Tensor = model.generate(
                features, max_new_tokens=1, min_new_tokens=1, do_sample=False, num_beams=1, return_timestamps=False,
                force_unique_generate_call=True,  # returns the beginning too
            )  # fmt: skip
        return found[:, :-1]


MEANING = "a text from a recording"
AUTO = "AutoModelForSpeechSeq2Seq"
TASK = Speech
