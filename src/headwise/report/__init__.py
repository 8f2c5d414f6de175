"""Dossier in, one self-contained HTML page and a model card out. Data first, drawing second; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.report import _data as data
from headwise.report._card import card
from headwise.report._compare import compare_page
from headwise.report._facts import certificate_rows
from headwise.report._fragment import fragment
from headwise.report._judged import headline, not_measured, status
from headwise.report._page import page
from headwise.types import Dossier, Verdict


def render(dossier: Dossier) -> str:
    """The report: one HTML page that loads nothing. Stages that have not run say which command makes them."""
    return page(dossier)


def model_card(dossier: Dossier) -> str:
    """The same facts as a Hugging Face model card."""
    return card(dossier)


def compare(dossiers: Sequence[tuple[str, Dossier]]) -> str:
    """Several runs, by name, on one page."""
    return compare_page(dossiers)


def certificate(verdict: Verdict) -> tuple[tuple[str, ...], ...]:
    """Every measured quantity in words: name, before, after, change, interval of after."""
    return certificate_rows(Dossier({}, None, None, None, verdict))


__all__ = [
    "certificate",
    "compare",
    "data",
    "fragment",
    "headline",
    "model_card",
    "not_measured",
    "render",
    "status",
]
