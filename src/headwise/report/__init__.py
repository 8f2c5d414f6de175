"""Dossier in, one self-contained HTML page and a model card out. Data first, drawing second; no torch."""

from __future__ import annotations

from headwise.report._card import card
from headwise.report._page import page
from headwise.types import Dossier


def render(dossier: Dossier) -> str:
    """The report: one HTML page that loads nothing. Stages that have not run say which command makes them."""
    return page(dossier)


def model_card(dossier: Dossier) -> str:
    """The same facts as a Hugging Face model card."""
    return card(dossier)


__all__ = ["model_card", "render"]
