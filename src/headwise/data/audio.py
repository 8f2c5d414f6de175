"""Calibration and evaluation recordings from .wav files, prepared by the model's own feature extractor.

A row is a recording and its transcript: one place for every token of both, with a marker between them. A place holds a
mark (the token, in the transcript) and numbers (two frames of the spectrogram, in the sound). So a row is as long
as its tokens. All of it is float32, which is exact for every token.
"""

import json
import random
import struct
import wave
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.errors import DataError

FRAMES = 2  # of a spectrogram that make one token
BATCH = 16  # recordings that are prepared together
LOUDEST = 1e4  # far above every number of a sound spectrogram, which lie between about -1 and 2
WAV = "*.[wW][aA][vV]"
MEANING = (
    'a folder of .wav files, or a jsonl file with {"audio": "FILE.wav"} on every line, and a "target" beside it on all '
    "lines or on none"
)


class Recording(NamedTuple):
    """Sound of one channel, and its transcript where that is known."""

    sound: np.ndarray
    target: str | None = None


class RecordingRows(NamedTuple):
    """Rows without their transcripts, and the transcripts, if they are known."""

    rows: torch.Tensor
    targets: list[str] | None


def read(source: str, extractor: Any, count: int, seed: int) -> RecordingRows:
    """At most `count` recordings in random order; those longer than the model hears at once are cut in pieces."""
    rows: list[torch.Tensor] = []
    targets: list[str | None] = []
    recordings = islice(_recordings(source, extractor, seed), count)
    while some := list(islice(recordings, BATCH)):
        rows.append(prepare([recording.sound for recording in some], extractor, source))
        targets += [recording.target for recording in some]
    if not rows:
        raise DataError(f"{source} holds no recordings. Give {MEANING}.")
    known = [target for target in targets if target is not None]
    if known and len(known) < len(targets):
        raise DataError(f'{source} has a "target" on some lines only; give one on every line, or on none.')
    return RecordingRows(torch.cat(rows), known or None)


def prepare(sounds: Sequence[np.ndarray], extractor: Any, what: str = "these recordings") -> torch.Tensor:
    """Recordings as rows without a text."""
    try:
        found: Any = extractor(list(sounds), sampling_rate=extractor.sampling_rate, return_tensors="pt")
        features: torch.Tensor = found["input_features"].float()
    except Exception as error:  # extractors raise their own kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{what} cannot be prepared by the model's feature extractor ({reason}).") from None
    if not float(features.abs().max()) < LOUDEST:
        raise DataError(
            f"{what}: the model's feature extractor gives numbers that no spectrogram holds; restore the model's "
            "preprocessor_config.json or processor_config.json, or remove recordings that are damaged."
        )
    return sounding(features)


def sounding(features: torch.Tensor) -> torch.Tensor:
    """Spectrograms (N, bins, frames) as rows without a text; the mark of sound is 0."""
    count, bins, frames = features.shape
    return torch.nn.functional.pad(features.mT.reshape(count, frames // FRAMES, FRAMES * bins), (1, 0))


def features_of(rows: torch.Tensor) -> torch.Tensor:
    """The spectrograms of such rows."""
    count, tokens, numbers = rows.shape
    return rows[..., 1:].reshape(count, tokens * FRAMES, numbers // FRAMES).mT.contiguous()


def with_tokens(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows with more tokens, or other marks (N, T), at their end."""
    places = torch.nn.functional.pad(tokens.to(rows.dtype).unsqueeze(2), (0, rows.shape[2] - 1))
    return torch.cat((rows, places), 1)


def peek(source: str) -> None:
    """Refuse a source that holds no recordings."""
    path = Path(source)
    if not (any(path.rglob(WAV)) if path.is_dir() else _lists(path)):
        raise _no_recordings(source)


def _lists(path: Path) -> bool:
    return path.suffix == ".jsonl" and path.is_file()


def _no_recordings(source: str) -> DataError:
    what = "holds no recordings" if Path(source).exists() else "does not exist"
    return DataError(f"{source} {what}. Give {MEANING}.")


def _recordings(source: str, extractor: Any, seed: int) -> Iterator[Recording]:
    path, rate, most = Path(source), int(extractor.sampling_rate), int(extractor.n_samples)
    if path.is_dir():
        listed: list[tuple[Path, str | None]] = [(file, None) for file in sorted(path.rglob(WAV))]
    elif _lists(path):
        listed = list(_lines(path))
    else:
        raise _no_recordings(source)
    random.Random(seed).shuffle(listed)
    for file, target in listed:
        sound = wav(file, rate)
        if target is not None and len(sound) > most:
            raise DataError(f"{file} lasts {len(sound) / rate:.0f} s, but the model hears {most / rate:.0f} s; cut it.")
        for start in range(0, len(sound), most):
            yield Recording(sound[start : start + most], target)


def _lines(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Files, which are named as seen from the list, and their texts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        items = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}). Give {MEANING}.") from None
    for number, item in items:
        name, target = (item.get(key) if isinstance(item, dict) else None for key in ("audio", "target"))
        if not isinstance(name, str) or not (target is None or isinstance(target, str)):
            raise DataError(f'{path}, line {number}: every line must be {{"audio": "FILE.wav", "target": "..."}}.')
        yield path.parent / name, target


def wav(path: Path, rate: int) -> np.ndarray:
    """A .wav file of 16 bits as one channel at this rate, between -1 and 1; other rates are interpolated."""
    if not path.is_file():  # nor a pipe, from which reading would never end
        raise DataError(f"{path} cannot be read: it is missing, or no file. Restore or remove it.")
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, own, count = file.getparams()[:4]
            content = file.readframes(count)
        sound: np.ndarray = np.frombuffer(content, "<i2" if width == 2 else "u1").reshape(-1, channels).mean(1) / 32768
    except (OSError, EOFError, wave.Error, struct.error, ValueError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read as a .wav file of 16 bits ({error}); convert or remove it.") from None
    if width != 2:
        raise DataError(f"{path} has {8 * width} bits where 16 are read; convert or remove it.")
    if not own:
        raise DataError(f"{path} names no number of samples per second; convert or remove it.")
    if own != rate:
        sound = np.interp(np.arange(0, len(sound), own / rate), np.arange(len(sound)), sound) if len(sound) else sound
    return np.asarray(sound, np.float32)
