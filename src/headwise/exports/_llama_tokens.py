"""A tokenizer as llama.cpp's files hold it: the words, how they merge, and how text is split before that.

llama.cpp splits text for byte-level vocabularies by rules that have names in its code. A file can only name one of
them. `RULES` has those of widespread tokenizers; any other tokenizer is refused, because the file would run and read
every text wrongly.
"""

import json
from typing import Any

from headwise.errors import ModelError

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of words in a GGUF file
NEVER = 10**9  # the rank of what no merge makes
NO_MERGES = ["\u0100 \u0100"]  # of two zero bytes: a file must have one
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
RULES: dict[tuple[Any, ...], str] = {  # steps before merging -> llama.cpp's name for them
    (("ByteLevel", True),): "gpt-2",
    (("Digits", True), ("ByteLevel", True)): "smollm",
    (("Split", rf"{CONTRACTIONS}{WORD}|\p{{N}}{{1,3}}{REST}"), ("ByteLevel", False)): "llama-bpe",
    (("Split", rf"{CONTRACTIONS}{WORD}|\p{{N}}{REST}"), ("ByteLevel", False)): "qwen2",
}


def vocabulary(tokenizer: Any, size: int, form: str = "text") -> dict[str, Any]:
    """Fields of a GGUF file for a tokenizer, by the names that its writer's functions have after `add_`.

    `size` is the number of rows of the model's table; rows without a word get one that no text contains. With the
    form "ids" words do not merge: answers are spelled as they should be, but text must be given as token numbers.
    """
    special = {name: getattr(tokenizer, f"{name}_id", None) for name in ("bos_token", "eos_token", "pad_token")}
    found: dict[str, Any] = {f"{name}_id": number for name, number in special.items() if number is not None}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(backend.to_str()) if backend is not None else {}
    if spec.get("model", {}).get("type") != "BPE":
        raise _unknown("its words are not merged pair by pair (BPE)")
    model, words = spec["model"], _words(spec, size)
    found |= {"token_list": [word for word, _ in words], "token_types": [kind for _, kind in words]}
    first = tokenizer("a")["input_ids"][:1]
    found |= {"add_bos_token": first == [special["bos_token"]], "add_eos_token": False}
    if template := getattr(tokenizer, "chat_template", None):
        found["chat_template"] = template
    if model.get("byte_fallback"):
        return found | _pieces(spec, words)
    if form == "ids":
        return found | {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_merges": NO_MERGES}
    rule = RULES.get(_steps(spec.get("pre_tokenizer")))
    if rule is None:
        raise _unknown("it splits text in a way of its own before words are merged")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return found | {"tokenizer_model": "gpt2", "tokenizer_pre": rule, "token_merges": merges or NO_MERGES}


def _unknown(why: str) -> ModelError:
    return ModelError(
        f"llama.cpp has no rule for this model's tokenizer: {why}. Add --tokenizer ids for a file that is given token "
        "numbers in place of text."
    )


def _words(spec: dict[str, Any], size: int) -> list[tuple[str, int]]:
    """Every token's word and its kind, in the order of their numbers."""
    found = [(f"[unused {number}]", UNUSED) for number in range(size)]
    numbers = [*spec["model"]["vocab"].values(), *(token["id"] for token in spec.get("added_tokens", ()))]
    if beyond := [number for number in numbers if not 0 <= number < size]:
        raise ModelError(f"the tokenizer has a token {beyond[0]}, and the model's table {size} rows; export another.")
    for word, number in spec["model"]["vocab"].items():
        byte = spec["model"].get("byte_fallback") and len(word) == 6 and word.startswith("<0x")
        found[number] = (word, BYTE if byte else NORMAL)
    for token in spec.get("added_tokens", ()):
        unknown = token["content"] == spec["model"].get("unk_token")
        found[token["id"]] = (token["content"], UNKNOWN if unknown else CONTROL if token["special"] else OWN)
    return found


def _pieces(spec: dict[str, Any], words: list[tuple[str, int]]) -> dict[str, Any]:
    """The form of SentencePiece: no rule splits the text; words that merge first have the higher scores."""
    steps = _steps(spec.get("normalizer"))
    metaspace = [step for step in _listed(spec.get("pre_tokenizer")) if step["type"] == "Metaspace"]
    spaced = ("Replace", "\u2581") in steps or bool(metaspace)
    if not spaced or (spec.get("pre_tokenizer") and not metaspace):
        raise _unknown("it splits text in a way of its own before words are merged")
    prefix = ("Prepend", "\u2581") in steps or any(step.get("prepend_scheme") != "never" for step in metaspace)
    made: dict[str, int] = {}
    for rank, pair in enumerate(spec["model"]["merges"]):
        made.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    scores = [float(-made.get(word, NEVER)) if kind == NORMAL else 0.0 for word, kind in words]
    return {"tokenizer_model": "llama", "tokenizer_pre": "default", "token_scores": scores, "add_space_prefix": prefix}


def _listed(part: Any) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, nested ones in line."""
    if not part:
        return []
    inner = part.get("pretokenizers") or part.get("normalizers") if part["type"] == "Sequence" else None
    return [part] if inner is None else [step for each in inner for step in _listed(each)]


def _steps(part: Any) -> tuple[Any, ...]:
    """What the steps do, in a form that can be compared."""
    return tuple(map(_step, _listed(part)))


def _step(step: dict[str, Any]) -> tuple[Any, ...]:
    kind = step["type"]
    if kind == "ByteLevel":
        return (kind, step["use_regex"]) if not step["add_prefix_space"] else (kind, "prefix")
    if kind == "Digits":
        return kind, step["individual_digits"]
    if kind == "Split":
        plain = step["behavior"] == "Isolated" and not step["invert"]
        return kind, step["pattern"].get("Regex") if plain else "other"
    return (kind, step.get("content", step.get("prepend")))
