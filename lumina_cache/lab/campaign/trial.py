"""One action in one execution, with the facts about it that an observation carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ...actions import Action
from ...backend.capabilities import ATTENTION_WEIGHTS, QUERIES, Capability, Rung, observed
from ...errors import CampaignError, SimulationError
from ...gap.records import What
from ...scorers.observed import OBSERVED
from ..evaluate.subjects import OwnAction, Subject, is_placebo, is_reference, parse_subject
from . import simulated

__all__ = ["EXECUTIONS", "Trial", "needs", "read_trial"]

EXECUTIONS = ("real", "simulated")


@dataclass(frozen=True)
class Trial:
    """An action to be carried out (``real``) or imposed on the full cache (``simulated``)."""

    execution: str  #: one of EXECUTIONS
    action: str  #: text form
    role: str  #: one of the roles of observations
    rung: int  #: least rung that can execute it, by what it requires
    requires: tuple[str, ...]  #: names of capabilities above rung native, folded; see :func:`needs`

    def to_record(self) -> dict[str, object]:
        return asdict(self)

    def what(self, rung: Rung | None = None) -> What:
        """``rung``: the one at which it was carried out."""
        return What(self.action, self.rung if rung is None else int(rung), self.requires, self.role)


def read_trial(text: str, execution: str, role: str | None = None) -> Trial:
    """A trial from an action's text form; the role is told from the action where none is given.

    Raises:
        ActionSyntaxError: naming the part that was not understood.
        CampaignError: the execution cannot be had of this action, or the role is another.
    """
    if execution == "simulated":
        action = simulated.parse(text)
        try:
            simulated.check(action)
        except SimulationError as error:
            raise CampaignError(f"{error}; or leave it to real executions") from None
        own = (
            "ceiling" if simulated.foresees(action) else "placebo" if is_placebo(OwnAction(action)) else None
        )
        return _trial(execution, str(action), action, int(action.rung), own, role)
    subject: Subject = parse_subject(text)
    own = "reference" if is_reference(subject) else "placebo" if is_placebo(subject) else None
    if isinstance(subject, OwnAction):
        return _trial(execution, subject.text, subject.action, int(subject.action.rung), own, role)
    return _trial(execution, subject.text, None, int(subject.rung or Rung.NATIVE), own, role)


def _trial(
    execution: str, text: str, action: Action | None, rung: int, own: str | None, role: str | None
) -> Trial:
    if own is not None and role not in (None, own):
        raise CampaignError(f"{text} is a {own}, so it cannot be a {role}: leave role out")
    if role == "ceiling" and own != "ceiling":
        raise CampaignError(f"{text} looks at nothing that a cache could not know, so it is no ceiling")
    requires = () if action is None else needs(action.requires)
    return Trial(execution, text, role or own or "candidate", rung, requires)


def needs(requires: Iterable[Capability]) -> tuple[str, ...]:
    """Names of what an action needs of a backend beyond rung native, sorted.

    ``OBSERVED_…`` says that a scorer's statistics have been kept so far. Keeping them is the cache's own doing, out of the
    queries or weights that the backend shows, which the action requires as well. An attribution that counted both would
    divide what one limit costs between two names, one per scorer, so they are folded into what they are made of.
    """
    found = set(requires)
    if found & {ATTENTION_WEIGHTS, QUERIES}:
        found -= {observed(name) for name in OBSERVED}
    return tuple(sorted(str(c) for c in found if c.rung > Rung.NATIVE))
