"""Dossier in, one self-contained HTML page and a model card out. Data first, drawing second; no torch."""

from __future__ import annotations

from headwise.report._card import model_card
from headwise.report._compare import compare
from headwise.report._fragment import fragment
from headwise.report._healing import recovery_in_words
from headwise.report._judged import headline, not_measured, status
from headwise.report._page import render
from headwise.report._tables import Table, lengths, measured, retrieval

__all__ = [
    "Table",
    "compare",
    "fragment",
    "headline",
    "lengths",
    "measured",
    "model_card",
    "not_measured",
    "recovery_in_words",
    "render",
    "retrieval",
    "status",
]
