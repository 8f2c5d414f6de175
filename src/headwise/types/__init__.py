"""The nouns of Headwise: frozen, JSON both ways, no torch."""

from headwise.types._record import VERSION, Record, write_atomically
from headwise.types.healing import Gain, Healing, HealingStage, LossPoint
from headwise.types.latency import PHASES, HeldOut, LatencyTable, Lattice, LayerTime, Workload
from headwise.types.plan import DEFAULT_UNITS, UNITS, Budget, LayerKeep, Plan, Point
from headwise.types.reading import Reading, Readings
from headwise.types.shape import GONE, ROLES, Grain, LayerShape, ModelShape
from headwise.types.sweep import Answer, Sweep
from headwise.types.verdict import Check, Dossier, LengthQuality, Retrieval, Sample, Verdict

__all__ = [
    "DEFAULT_UNITS",
    "GONE",
    "PHASES",
    "ROLES",
    "UNITS",
    "VERSION",
    "Answer",
    "Budget",
    "Check",
    "Dossier",
    "Gain",
    "Grain",
    "Healing",
    "HealingStage",
    "HeldOut",
    "LatencyTable",
    "Lattice",
    "LayerKeep",
    "LayerShape",
    "LayerTime",
    "LengthQuality",
    "LossPoint",
    "ModelShape",
    "Plan",
    "Point",
    "Reading",
    "Readings",
    "Record",
    "Retrieval",
    "Sample",
    "Sweep",
    "Verdict",
    "Workload",
    "write_atomically",
]
