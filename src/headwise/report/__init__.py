"""Dossier in, one self-contained HTML page and a model card out. Data first, drawing second; no torch."""

from __future__ import annotations

from headwise.report._bits import longest_text, mean_bits, plan_in_bits
from headwise.report._card import model_card
from headwise.report._compare import compare
from headwise.report._data import byte_steps, counts_bytes, fitting
from headwise.report._explore import proof
from headwise.report._fragment import fragment
from headwise.report._healing import recovery_in_words
from headwise.report._judged import headline, not_measured, status
from headwise.report._page import render
from headwise.report._tables import Table, lengths, measured, retrieval
from headwise.report._words import WHEN, damage_numbers

__all__ = [
    "WHEN",
    "Table",
    "byte_steps",
    "compare",
    "counts_bytes",
    "damage_numbers",
    "fitting",
    "fragment",
    "headline",
    "lengths",
    "mean_bits",
    "measured",
    "model_card",
    "not_measured",
    "longest_text",
    "plan_in_bits",
    "proof",
    "recovery_in_words",
    "render",
    "retrieval",
    "status",
]
