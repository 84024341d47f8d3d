"""How much is measured. A value, written into every profile."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..evaluate import Plan

__all__ = ["FULL", "QUICK", "Settings", "plan_of"]

#: Documents that are named in the files at most, so that a longer run goes on from a shorter one.
MOST_DOCUMENTS = 30


@dataclass(frozen=True)
class Settings:
    """Settings of one calibration. Lengths are in tokens.

    Tokens of one document are much alike, so few are scored on each and time goes into more documents. They are fed in
    one block, as many as are kept dense before they are sealed: fed one by one they give the same figures.

    Codecs and evictions are measured on up to ``documents`` documents, one after another, for as long as there is time;
    what checks assumptions on the first ``checked`` of them.
    """

    plan: Plan = Plan(
        contexts=((1024, MOST_DOCUMENTS),),
        tests=("T1", "T2"),
        scored=32,
        block=32,
        depths=(0.25, 0.75),
        cue=12,
        copied=16,
        free_run_documents=0,
        timed_documents=0,
    )
    documents: int = 12
    checked: int = 4
    quick: bool = False
    shares: tuple[float, ...] = (0.75, 0.5, 0.375, 0.25, 0.125, 0.0625)
    recent: int = 32  #: newest rows that evictions protect, beside the default number of sinks
    layer_groups: int | None = None  #: layers are measured in so many groups of neighbours; None: one by one
    layer_bits: int = 3  #: of the codec by which layers are compared
    timed_rows: tuple[int, ...] = (512, 1024, 4096)
    timed_steps: int = 9
    seed: int = 0

    @property
    def context(self) -> int:
        return self.plan.contexts[0][0]

    def to_record(self) -> dict[str, Any]:
        """As JSON reads it back."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found


FULL = Settings()

#: A look, not a result: one short document, few actions, layers in groups.
QUICK = Settings(
    plan=replace(FULL.plan, contexts=((256, 3),)),
    documents=1,
    checked=1,
    quick=True,
    shares=(0.5, 0.25),
    layer_groups=4,
    timed_rows=(256,),
    timed_steps=5,
)


def plan_of(settings: Settings, index: int) -> Plan:
    """The evaluation's plan for one document: passages to copy stand at other depths in each.

    Which rows an eviction drops depends on where they stand, so fixed depths would turn the damage over the share into
    a staircase. Documents take their depths from a van der Corput sequence (base 2), which fills the interval evenly
    however many documents there are.
    """
    depths = settings.plan.depths
    span = 0.9 / len(depths)  # the last tenth is left for the passage itself
    return replace(settings.plan, depths=tuple((i + _corput(index)) * span for i in range(len(depths))))


def _corput(index: int) -> float:
    found, scale = 0.0, 0.5
    index += 1
    while index:
        found += scale * (index % 2)
        index, scale = index // 2, scale / 2
    return found
