"""The trained models that experiments use, with the text each is calibrated and evaluated on."""

from __future__ import annotations

from pathlib import Path

from experiments._provenance import used
from headwise import families
from headwise.runs.folder import Settings

LABELS = {
    "embedded": "embedded (6.6M, Python code)",
    "stories15M": "stories15M",
    "smollm2": "SmolLM2-135M (Q4_1, dequantised)",
}
Tokens = tuple[int, int, int]  # calibration, evaluation, measured prices


def available(assets: Path | None, wanted: tuple[str, ...] = tuple(LABELS)) -> list[str]:
    """The wanted models that are here with texts to read; the embedded one always is."""
    return [name for name in wanted if name == "embedded" or _here(assets, name)]


def _here(assets: Path | None, name: str) -> bool:
    return assets is not None and (assets / name).is_dir() and (assets / "text").is_dir()


def settings_for(name: str, assets: Path | None, device: str, tokens: Tokens, length: int, **more: object) -> Settings:
    """How a model is probed and evaluated: text of the kind it was made for, never the same for both.

    Dimensions are cut, and no bits: the claims are about dimensions.
    """
    sizes = dict(tokens=tokens[0], eval_tokens=tokens[1], swap_tokens=tokens[2], device=device)
    sizes |= {"allow": ("qk", "v", "mlp"), **more}
    if name == "embedded" or assets is None:
        used(Path(families.locate(families.EMBEDDED)[0]), "embedded")
        return Settings(model="embedded", length=length, **sizes)
    text = used(assets / "text")
    used(assets / name)
    if name == "stories15M":
        return Settings(
            model=str(assets / name),
            data=f"{text / 'stories-cal.txt'}+self",
            eval=str(text / "stories-eval.txt"),
            length=min(length, 256),
            **sizes,
        )
    gguf = next((assets / name).glob("*.gguf"))
    return Settings(
        model=str(gguf), data=str(text / "mix.txt"), eval=str(text / "wikitext-eval.txt"), length=length, **sizes
    )
