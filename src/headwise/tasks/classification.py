"""Sequence classification: one label, several labels or a score for a whole text."""

from headwise.tasks._rows import Classes


class Classification(Classes):
    """Class probabilities of texts."""

    name = "classification"
    unit = "nats per text"


MEANING = "one label, several labels, or a score for a text"
AUTO = "AutoModelForSequenceClassification"
TASK = Classification
