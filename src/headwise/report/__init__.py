"""Dossier in, one self-contained HTML page and a model card out. Data first, drawing second; no torch."""

from headwise.report._bits import longest_text as longest_text
from headwise.report._bits import mean_bits as mean_bits
from headwise.report._bits import plan_in_bits as plan_in_bits
from headwise.report._card import model_card as model_card
from headwise.report._commands import for_engine as for_engine
from headwise.report._compare import compare as compare
from headwise.report._data import at_sizes as at_sizes
from headwise.report._data import byte_steps as byte_steps
from headwise.report._data import counts_bytes as counts_bytes
from headwise.report._data import thin as thin
from headwise.report._explore import proof as proof
from headwise.report._fragment import fragment as fragment
from headwise.report._healing import recovery_in_words as recovery_in_words
from headwise.report._judged import headline as headline
from headwise.report._judged import not_measured as not_measured
from headwise.report._judged import status as status
from headwise.report._page import render as render
from headwise.report._tables import Table as Table
from headwise.report._tables import lengths as lengths
from headwise.report._tables import measured as measured
from headwise.report._tables import retrieval as retrieval
from headwise.report._words import WHEN as WHEN
from headwise.report._words import damage_numbers as damage_numbers
