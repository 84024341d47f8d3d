"""Where one step ends and the next begins, told from masks, updates and touches alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lumina_cache.steps import StepTracker


class Layer:
    """The least that a tracker needs of a layer."""

    def __init__(self, holds_rows: bool = True) -> None:
        self.holds_rows = holds_rows
        self._steps: Any = None
        self._seen = 0

    def mask(self, n: int) -> None:
        self._steps.on_mask(n)

    def update(self, n: int) -> None:
        self._steps.on_update(self, n)
        self._steps.on_updated()

    def read(self) -> None:
        self._steps.on_read()

    def touch(self) -> None:
        self._steps.on_touch()


@dataclass
class Listener:
    """Writes down what it is told; ``began`` are steps in which rows may not be changed any more."""

    began: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    touches: int = 0

    def step_begins(self, steps: StepTracker, tokens: int) -> None:
        self.begins.append(tokens)

    def step_began(self, steps: StepTracker, tokens: int) -> None:
        self.began.append(tokens)

    def touched(self, steps: StepTracker) -> None:
        self.touches += 1


def tracked(n: int = 3, *, states: int = 0) -> tuple[StepTracker, Listener, list[Layer]]:
    listener = Listener()
    steps = StepTracker(listener)  # type: ignore[arg-type]
    layers = [*(Layer() for _ in range(n)), *(Layer(holds_rows=False) for _ in range(states))]
    for layer in layers:
        steps.attach(layer)  # type: ignore[arg-type]
    return steps, listener, layers


def step(layers: list[Layer], n: int = 1, *, mask: bool = True) -> None:
    if mask:
        layers[0].mask(n)
    for layer in layers:
        layer.update(n)


def test_nothing_has_begun_in_a_new_tracker_and_rows_may_be_changed() -> None:
    steps, listener, _ = tracked()
    assert (steps.step, steps.phase, steps.at_boundary) == (0, None, True)
    assert listener.begins == []


def test_a_step_begins_at_its_first_mask_and_ends_after_its_last_update() -> None:
    steps, listener, layers = tracked()
    layers[0].mask(5)
    assert (steps.step, steps.tokens, steps.phase, steps.at_boundary) == (1, 5, "prefill", False)
    for layer in layers[:-1]:
        layer.update(5)
        assert not steps.at_boundary
    layers[-1].update(5)
    assert steps.at_boundary
    assert listener.begins == [5]


def test_masks_asked_of_several_layers_within_a_step_begin_it_once() -> None:
    steps, listener, layers = tracked()
    layers[0].mask(5)
    layers[2].mask(5)
    layers[0].update(5)
    layers[1].mask(5)
    layers[1].update(5)
    layers[2].update(5)
    assert (steps.step, listener.begins) == (1, [5])


def test_a_touch_reaches_the_listener_at_a_boundary_only() -> None:
    _, listener, layers = tracked()
    layers[0].touch()
    layers[0].mask(2)
    layers[0].touch()
    layers[0].update(2)
    layers[0].touch()
    assert listener.touches == 1
    layers[1].update(2)
    layers[2].update(2)
    layers[0].touch()
    assert listener.touches == 2


def test_single_tokens_need_no_mask_to_be_steps() -> None:
    steps, listener, layers = tracked()
    for _ in range(4):
        step(layers, mask=False)
    assert (steps.step, listener.begins, listener.began) == (4, [1, 1, 1, 1], [])


def test_several_tokens_without_a_mask_are_a_step_in_which_rows_may_not_be_changed_any_more() -> None:
    """The model has built a mask of its own by then; the listener still has to hear of the tokens."""
    steps, listener, layers = tracked()
    step(layers, 7, mask=False)
    step(layers, 4, mask=False)
    assert (steps.step, listener.begins, listener.began) == (2, [], [7, 4])


def test_entries_that_are_never_updated_are_not_waited_for_after_two_steps() -> None:
    steps, listener, layers = tracked(4)
    used = layers[:3]
    for _ in range(2):
        step(used)
        assert not steps.at_boundary
    step(used)
    assert steps.at_boundary
    step(used)
    assert steps.step == 4
    assert (listener.begins, listener.began) == ([1, 1], [1, 1])


def test_a_step_cut_short_changes_nothing_about_what_is_waited_for() -> None:
    steps, _, layers = tracked()
    step(layers)
    layers[0].mask(1)
    layers[0].update(1)  # … and the model raised
    layers[0].mask(1)
    layers[0].update(1)
    assert not steps.at_boundary, "layers 1 and 2 of this step are still to come"
    layers[1].update(1)
    assert not steps.at_boundary
    layers[2].update(1)
    assert steps.at_boundary
    assert steps.step == 3


def test_steps_cut_short_again_and_again_at_the_same_layer_do_not_either() -> None:
    steps, _, layers = tracked()
    step(layers)
    for _ in range(5):
        layers[0].mask(1)
        layers[0].update(1)
        layers[1].update(1)
    layers[0].mask(1)
    layers[0].update(1)
    layers[1].update(1)
    assert not steps.at_boundary
    layers[2].update(1)
    assert steps.at_boundary


def test_layers_beyond_those_expected_prolong_the_step() -> None:
    steps, listener, layers = tracked()
    steps.expect(2)
    step(layers)
    assert steps.at_boundary
    layers[0].mask(1)
    layers[0].update(1)
    layers[1].update(1)
    assert not steps.at_boundary, "a third layer was updated last time"
    layers[2].update(1)
    assert steps.at_boundary
    assert listener.begins == [1, 1]


def test_a_model_that_reads_rows_again_after_the_last_update_is_waited_for_from_its_second_step_on() -> None:
    """Borrowers of K/V read the donor's rows after every layer has been updated, and attend with the step's mask."""
    steps, _, layers = tracked()
    step(layers)
    layers[1].read()
    layers[2].read()
    step(layers)
    assert not steps.at_boundary
    layers[1].read()
    assert not steps.at_boundary
    layers[2].read()
    assert steps.at_boundary
    assert steps.step == 2


def test_a_read_from_outside_holds_up_one_step_only() -> None:
    steps, _, layers = tracked()
    step(layers)
    layers[0].read()  # by a curious caller
    step(layers)
    step(layers)
    step(layers)
    assert steps.at_boundary
    assert steps.step == 4


def test_a_model_without_rows_steps_at_each_mask_of_its_state() -> None:
    steps, listener, _ = tracked(0, states=2)
    for n in (5, 1):
        steps.on_state_mask(n)
        assert steps.at_boundary
    assert (steps.step, steps.tokens, listener.touches) == (2, 1, 2)


def test_masks_of_state_do_not_begin_steps_of_a_model_that_holds_rows() -> None:
    steps, listener, layers = tracked(2, states=1)
    steps.on_state_mask(3)
    assert steps.step == 0
    step(layers[:2], 3)
    assert (steps.step, listener.begins) == (1, [3])


def test_layers_are_held_weakly() -> None:
    steps, _, layers = tracked()
    assert len(steps.layers) == 3
    del layers[1]
    assert len(steps.layers) == 2


def test_a_detached_layer_is_not_waited_for() -> None:
    steps, _, layers = tracked()
    steps.detach(layers[1])  # type: ignore[arg-type]
    step([layers[0], layers[2]])
    assert steps.at_boundary
    assert layers[1]._steps is None
