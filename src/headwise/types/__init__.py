"""The nouns of Headwise: frozen, JSON both ways, no torch."""

from headwise.types._record import VERSION, Record, write_atomically
from headwise.types.codes import BITS, code_bytes
from headwise.types.healing import Gain, Healing, HealingStage, LossPoint
from headwise.types.latency import PHASES, CodeLattice, HeldOut, LatencyTable, Lattice, LayerTime, Workload
from headwise.types.measure import BeforeAfter, Measure
from headwise.types.plan import Budget, FrontierPoint, LayerKeep, Plan
from headwise.types.reading import Reading, Readings
from headwise.types.shape import GONE, ROLES, Grain, LayerShape, ModelShape
from headwise.types.sweep import Answer, Sweep
from headwise.types.unit import CUTS, DAMAGE, DEFAULT_UNITS, SIZED, UNIT_OF, UNITS, Unit, under_time
from headwise.types.verdict import Check, LengthQuality, Retrieval, Sample, Verdict

__all__ = [
    "BITS", "CUTS", "DAMAGE", "DEFAULT_UNITS", "GONE", "PHASES", "ROLES", "SIZED", "UNITS", "UNIT_OF", "VERSION",
    "Answer", "BeforeAfter", "Budget", "Check", "CodeLattice", "FrontierPoint", "Gain", "Grain", "Healing",
    "HealingStage", "HeldOut", "LatencyTable", "Lattice", "LayerKeep", "LayerShape", "LayerTime", "LengthQuality",
    "LossPoint", "Measure", "ModelShape", "Plan", "Reading", "Readings", "Record", "Retrieval", "Sample", "Sweep",
    "Unit", "Verdict", "Workload", "code_bytes", "under_time", "write_atomically",
]  # fmt: skip
