"""One action in one execution, with the facts about it that an observation carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ...backend.capabilities import ATTENTION_WEIGHTS, QUERIES, Capability, Rung, observed
from ...errors import CampaignError
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
    subject: Subject
    if execution == "simulated":
        subject, own = simulated.read(text)
    else:
        subject = parse_subject(text)
        own = "reference" if is_reference(subject) else "placebo" if is_placebo(subject) else None
    _check_role(subject.text, own, role)
    if isinstance(subject, OwnAction):
        rung, requires = int(subject.action.rung), needs(subject.requires)
    else:
        rung, requires = int(subject.rung or Rung.NATIVE), ()
    return Trial(execution, subject.text, role or own or "candidate", rung, requires)


def _check_role(text: str, own: str | None, role: str | None) -> None:
    if own is not None and role not in (None, own):
        raise CampaignError(f"{text} is a {own}, so it cannot be a {role}: leave role out")
    if role == "ceiling" and own != "ceiling":
        raise CampaignError(f"{text} looks at nothing that a cache could not know, so it is no ceiling")


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
