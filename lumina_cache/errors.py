"""Errors and warnings raised by lumina_cache. Each message names the value at fault and what to do about it."""

from __future__ import annotations

__all__ = [
    "ActionInfeasibleError",
    "ActionSyntaxError",
    "AgreementError",
    "AnalysisError",
    "AnalysisUnavailableError",
    "AttentionInputError",
    "BackendInterfaceError",
    "BudgetError",
    "CalibrationError",
    "CampaignError",
    "DatabaseError",
    "DiskBudgetError",
    "DiskCorruptError",
    "DiskDirectoryError",
    "DiskFormatError",
    "DiskFullError",
    "DiskTierError",
    "EngagementError",
    "EstimateInputError",
    "EvaluationError",
    "LogFormatError",
    "LuminaError",
    "LuminaWarning",
    "MixedExecutionStateError",
    "ModelShapeError",
    "ModelUnavailableError",
    "ObservationError",
    "PageError",
    "ProfileFormatError",
    "QueryBankError",
    "RankLostError",
    "RanksApartError",
    "SimulationError",
    "TableFormatError",
    "UnsupportedCacheError",
]


class LuminaError(Exception):
    """Base class of every error that this library raises on purpose."""


class BackendInterfaceError(LuminaError):
    """The installed mlx-lm does not have the cache interface that this version was written for."""


class UnsupportedCacheError(LuminaError, ValueError):
    """A cache, layer or combination of models that cannot be managed."""


class BudgetError(LuminaError, ValueError):
    """A budget that cannot be read, or that no feasible action can hold."""


class CalibrationError(LuminaError, ValueError):
    """A calibration that cannot be made or kept as asked: of this model, within this time, or in this file."""


class CampaignError(LuminaError, ValueError):
    """A plan that no campaign can be made from, or a store that holds another campaign."""


class DatabaseError(LuminaError, ValueError):
    """A feasibility database, or a file for it, that cannot be read or written; or a question it has no answer to."""


class ActionSyntaxError(LuminaError, ValueError):
    """The text of an action that the parser does not accept."""


class ActionInfeasibleError(LuminaError):
    """An action that this backend cannot execute in this state; the cache is left as it was."""


class AgreementError(LuminaError, ValueError):
    """Numbers or settings that several ranks cannot agree on."""


class AnalysisError(LuminaError, ValueError):
    """A store of observations, or a question to it, that no analysis can be made from."""


class AnalysisUnavailableError(LuminaError, ImportError):
    """A package that the analysis of observations needs is not installed."""


class AttentionInputError(LuminaError, ValueError):
    """Queries, rows or a mask whose shapes do not go together, or that no attention can be computed for."""


class DiskTierError(LuminaError):
    """Arrays could not be written to a file or read back. What was written before is as it was."""


class DiskBudgetError(DiskTierError):
    """Writing would exceed the bytes that one cache, or all caches of a directory, may have on the disk."""


class DiskCorruptError(DiskTierError):
    """A file is missing, or is not what was written to it. None of its numbers was given out."""


class DiskDirectoryError(DiskTierError):
    """A directory that is unsafe, that was deleted, or that may not be written to or locked."""


class DiskFormatError(DiskTierError, ValueError):
    """A file that was not written by this library or this version of its format, or arrays that it cannot hold."""


class DiskFullError(DiskTierError):
    """The file system, or the user's quota on it, has no room left."""


class EngagementError(LuminaError):
    """An action ran but what was observed afterwards is not what was asked for."""


class EstimateInputError(LuminaError, ValueError):
    """A context, chunk, device or choice of model that no estimate can be made for."""


class EvaluationError(LuminaError, ValueError):
    """A text, length, test or result file that no evaluation can be made from."""


class LogFormatError(LuminaError, ValueError):
    """A log line that does not follow the event table."""


class MixedExecutionStateError(LuminaError, TypeError):
    """Observations of different execution states (real, backend_infeasible, simulated) were combined."""


class ModelShapeError(LuminaError, ValueError):
    """The shapes of a model's cache cannot be known from its configuration; says which field or module, and why."""


class ModelUnavailableError(LuminaError):
    """A model, or the package that ships it, is not there."""


class ProfileFormatError(LuminaError, ValueError):
    """A file of calibrated figures that cannot be read."""


class QueryBankError(LuminaError, ValueError):
    """A query bank that cannot be captured or read, or that belongs to another model."""


class RankLostError(LuminaError):
    """Another rank of a distributed generation has died or hangs. The cache is as it was, and nothing more is decided."""


class RanksApartError(LuminaError):
    """The ranks of a distributed generation are not at the same point of it."""


class ObservationError(LuminaError):
    """What was observed of a layer's attention does not fit its rows, or is not enough to rank them by."""


class PageError(LuminaError, ValueError):
    """A page without the marks that a program's tables belong between, or that cannot be read or written."""


class SimulationError(LuminaError, ValueError):
    """An action, model or state that the simulator has no forward for; says what there is."""


class TableFormatError(LuminaError, ValueError):
    """A file of the table of architectures that cannot be read."""


class LuminaWarning(UserWarning):
    """Something was not done as asked; generation goes on, correctly."""
