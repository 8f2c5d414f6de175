"""Dossiers for tests of the report, and what must hold of any page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

from headwise.cost import kv_bytes_per_token, parameters
from headwise.report._html import policy, script
from headwise.runs.dossier import Baseline, Dossier
from headwise.runs.settings import Settings
from headwise.types import (
    Budget,
    Check,
    FrontierPoint,
    Gain,
    Grain,
    Healing,
    LayerKeep,
    LayerShape,
    ModelShape,
    Plan,
    Reading,
    Readings,
    Sample,
    Verdict,
)

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = (
    "</title></svg><script>alert('x')</script>\"'|`````\n# h1 <img src=x onerror=alert(1)>\x00\ud800\u202e ${x} &amp;"
)
QK, V, MLP = (64, 48, 32, 16), (64, 48, 32, 16), (1024, 768, 512, 256)


def curve(
    kind: str, axis: str, ticks: tuple[int, ...], layers: int, scale: float = 1e-3, probe: str = "sensitivity"
) -> Reading:
    values = tuple(tuple(scale * (layer + 1) * (8.0**i - 1) for i in range(len(ticks))) for layer in range(layers))
    errors = tuple(tuple(0.2 * v for v in row) for row in values)
    meaning = f"Predicted loss increase by {axis}."
    return Reading(probe, f"{kind}", axis, (ticks,) * layers, values, errors, "nats per token", meaning, 4096, 0)


def make_readings(shape: ModelShape, model: str) -> Readings:
    n = len(shape.layers)
    curves = (
        curve("damage.qk_projected", "qk_dim", QK, n, 1e-5),
        curve("damage.v", "v_dim", V, n, 2e-5),
        curve("damage.mlp", "mlp_width", MLP, n, 4e-5),
        curve("damage.heads", "queries_per_group", (4, 3, 2, 1), n, 1e-4),
        curve("damage.kv_heads", "kv_heads", (4, 3, 2, 1), n, 1e-4),
        curve("damage.qk_pairs", "qk_width", QK, n, 3e-5),
        curve("spectrum.entropy", "direction", (0, 1, 2, 3, 4), n),
        curve("damage.v", "v_dim", V, n, 3e-5, "swap"),
    )
    return Readings(model, shape, curves, ({},) * n, 65536, 0, 41.5)


def make_plan(layers: int, model: str) -> Plan:
    old = LayerShape(16, 4, 64, 64, 1024, 64)
    grain = Grain(16, 16, 256, 16, 16, 256, True, True)
    source = ModelShape("llama", 512, 8000, True, (old,) * layers, grain, element_bytes=2)
    plain = LayerKeep()
    dims = (replace(old, qk_dim=48), plain)
    wide = (replace(old, v_dim=32, mlp_width=512), LayerKeep(mlp_channels=tuple(range(0, 1024, 2))))
    pairs = (replace(old, qk_dim=32, qk_width=32, v_dim=48), LayerKeep(rotary_pairs=(tuple(range(16)),) * 4))
    heads = (replace(old, query_heads=12), LayerKeep(query_heads=tuple(h for h in range(16) if h % 4 != 1)))
    groups = (replace(old, query_heads=12, kv_heads=3), LayerKeep(tuple(range(4, 16)), (1, 2, 3)))
    menu = [(old, plain), dims, wide, pairs, heads, groups]
    chosen = [menu[i % len(menu)] for i in range(layers)]
    target = source.with_layers(tuple(new for new, _ in chosen))
    full = kv_bytes_per_token(source)
    budgets = (
        Budget("kv", "bytes per token", 0.9 * full, 2048, "kv=90%"),
        Budget("params", "parameters", 1e12, 2048, "params=1T"),
    )
    spent = {"kv": float(kv_bytes_per_token(target)), "params": float(parameters(target))}
    frontier = tuple(FrontierPoint(0.3 + 0.07 * i, 0.4 * math.exp(-i * 0.7) if i < 10 else 0.0) for i in range(11))
    return Plan(
        model, source, target, tuple(k for _, k in chosen), "exact", budgets, spent, 0.0123, 0, 1e-4, False, frontier
    )


def make_verdict(plan: Plan, text: str = "") -> Verdict:
    size = {
        "parameters_before": parameters(plan.source),
        "parameters_after": parameters(plan.target),
        "kv_bytes_per_token_before": kv_bytes_per_token(plan.source),
        "kv_bytes_per_token_after": kv_bytes_per_token(plan.target),
    }
    quality = {
        "perplexity_before": 18.2149, "perplexity_after": 18.7432,
        "perplexity_after_low": 18.5012, "perplexity_after_high": 18.9899,
        "loss_before": 2.9022, "loss_after": 2.9308, "kl": 0.0301, "kl_low": 0.0287, "kl_high": 0.0316,
        "next_token_agreement": 0.9312,
    }  # fmt: skip
    speed = {"decode_ms_per_token_before": 3.21, "decode_ms_per_token_after": 2.87, "prompt_tokens": 256.0}
    damage = {
        "sum_of_prices": 0.0123,
        "predicted": 0.0111,
        "measured": 0.0286,
        "measured_low": 0.0156,
        "measured_high": 0.0417,
    }
    checks = (
        Check(f"parameters as planned{text}", True, "4,1" + text, "4,1"),
        Check("reloads in a fresh process", True, "relative difference 0.0e+00", "at most 1e-04"),
    )
    before = "there was a small house at the edge of the wood, and in it lived an old woman who"
    samples = (Sample(f"Once upon a time{text}", before + text, before.replace("small", "little") + text),)
    return Verdict.of(
        quality,
        size,
        speed,
        damage,
        checks,
        samples,
        f"held out from stdlib{text}",
        32768,
        f"test CPU{text}",
        "2025-01-02",
    )


def make_dossier(layers: int = 6, model: str = "acme/tiny-llama", text: str = "") -> Dossier:
    plan = make_plan(layers, model)
    settings = Settings(
        model=model.replace("\0", ""), budgets=("kv=90%", "params=1T"), eval=f"eval file.txt{text}".replace("\0", ""),
        allow=("qk", "v", "mlp", "heads", "kv_heads"),
    )  # fmt: skip
    versions = {"headwise": "0.1", "torch": f"2.0{text}"}
    layer_gains = [{"attention": Gain(0.1 / (i + 1), 0.04 / (i + 1)), "mlp": Gain(0.2, 0.15)} for i in range(layers)]
    healing = Healing(f"refit{text}", tokens=65536, layers=tuple(layer_gains), seconds=12.5)
    full = kv_bytes_per_token(plan.source)
    baselines = (
        Baseline(f"uniform{text}", 0.05, {"kv": 0.88 * full}),
        Baseline("portable", 0.031, {"kv": 0.89 * full}),
    )
    readings, verdict = make_readings(plan.source, model), make_verdict(plan, text)
    return Dossier(settings, readings, plan, healing, verdict, baselines, versions=versions)


class Stack(HTMLParser):
    """Every tag that opens closes, in order; remembers what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [named["id"] or ""] if "id" in named else []
        bad = [
            k
            for k, v in attrs
            if k.startswith("on")
            or k in ("src", "srcset", "xlink:href")
            or (k == "href" and not re.match(r"#|[^:]*report\.html$", v or ""))
        ]
        self.loads += [f"{tag} {name}" for name in bad]
        self.loads += [tag] if tag in ("link", "iframe", "object", "embed", "img", "base", "form") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def scripts(page: str) -> list[str]:
    """What stands in the page's script elements: data first, then code."""
    return re.findall(r"<script[^>]*>(.*?)</script>", page, re.S)


def data_of(page: str) -> Any:
    """What the page's script is given."""
    return json.loads(scripts(page)[0])


def check_page(page: str) -> None:
    """What must hold for any dossier."""
    stack = Stack()
    stack.feed(page)
    stack.close()
    assert stack.open == [] and stack.loads == [] and len(stack.ids) == len(set(stack.ids))
    assert page.encode("utf-8") and "url(" not in page and "@import" not in page
    assert page.count("<script") == 2 and scripts(page)[1] == script(), "the page's own script and its data, no other"
    assert policy() in page and "script-src 'sha256-" in policy() and "unsafe-inline'; script" in policy()
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        told = root.get("role") == "img" and root.get("aria-label")
        assert told or root.get("aria-hidden"), "every picture says in words what it shows, or stands beside them"
        assert "nan" not in picture and "inf" not in picture.replace("information", "")
    assert page.count("<svg") == len(pictures) and page.count("<h1>") == 1
