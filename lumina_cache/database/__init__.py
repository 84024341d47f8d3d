"""What was found out on many machines, in one file: which actions run where, at what cost, and why not elsewhere."""

from .database import Added, Database, Merged, default_path
from .query import Answer, RealEvidence, RefusedEvidence, Selection, SimulatedEvidence

__all__ = [
    "Added",
    "Answer",
    "Database",
    "Merged",
    "RealEvidence",
    "RefusedEvidence",
    "Selection",
    "SimulatedEvidence",
    "default_path",
]
