"""The order of an epoch against an independent list-based version, a golden and the release's figures."""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.data.manifests import manifest_rows
from parallel_synthesis.data.order import Batch, Order
from parallel_synthesis.data.tasks import TASKS
from parallel_synthesis.errors import DataError

GENERAL = [name for name in TASKS if name != "browsecomp_textmas_toolcall"]


def naive_epochs(
    rows: dict[str, int], ranks: int, batch_size: int, seed: int, epochs: int
) -> list[list[list[tuple[str, list[int]]]]]:
    """epoch -> step -> rank -> (task, rows), with plain lists and as design.md words it."""
    generator = random.Random(seed)
    result = []
    for _ in range(epochs):
        all_groups: list[list[tuple[str, list[int]]]] = []
        for task, count in rows.items():
            numbers = list(range(count))
            generator.shuffle(numbers)
            batches = []
            while numbers:
                batches.append((task, numbers[:batch_size]))
                numbers = numbers[batch_size:]
            while len(batches) >= ranks:
                all_groups.append(batches[:ranks])
                batches = batches[ranks:]
        generator.shuffle(all_groups)
        result.append(all_groups)
    return result


def as_lists(order: Order, index: int) -> list[list[tuple[str, list[int]]]]:
    epoch = order.epoch(index)
    return [
        [(batch.task, list(batch.rows)) for batch in (epoch.batch(step, rank) for rank in range(order.ranks))]
        for step in range(len(epoch))
    ]


mixes = st.lists(st.integers(0, 60), min_size=1, max_size=4).map(
    lambda counts: {f"task_{number}": count for number, count in enumerate(counts)}
)


@settings(max_examples=150, deadline=None)
@given(mixes, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**40), st.integers(1, 3))
def test_equals_the_naive_version(
    rows: dict[str, int], ranks: int, batch_size: int, seed: int, epochs: int
) -> None:
    expected = naive_epochs(rows, ranks, batch_size, seed, epochs)
    if not expected[0]:
        with pytest.raises(DataError, match="no task has the"):
            Order(rows, ranks=ranks, batch_size=batch_size, seed=seed)
        return
    order = Order(rows, ranks=ranks, batch_size=batch_size, seed=seed)
    assert order.steps_per_epoch == len(expected[0])
    assert [as_lists(order, index) for index in range(epochs)] == expected
    for index in reversed(range(epochs)):  # backward, from the seed again
        assert as_lists(order, index) == expected[index]
    tasks = [step[0][0] for step in expected[0]]
    assert order.epoch(0).task_counts() == {task: tasks.count(task) for task in rows} == order.steps_per_task
    used = {
        task: [n for step in expected[0] for t, numbers in step if t == task for n in numbers]
        for task in rows
    }
    assert order.dropped_rows == {task: rows[task] - len(used[task]) for task in rows}
    used_batches = {task: sum(t == task for step in expected[0] for t, _ in step) for task in rows}
    assert order.dropped_batches == {task: -(-rows[task] // batch_size) - used_batches[task] for task in rows}


@settings(max_examples=60, deadline=None)
@given(mixes, st.integers(1, 3), st.integers(1, 3), st.integers(0, 99), st.integers(1, 70))
def test_steps_per_epoch_shortens_what_is_used_not_what_is_drawn(
    rows: dict[str, int], ranks: int, batch_size: int, seed: int, steps: int
) -> None:
    expected = naive_epochs(rows, ranks, batch_size, seed, 2)
    if not expected[0]:
        return
    order = Order(rows, ranks=ranks, batch_size=batch_size, seed=seed, steps_per_epoch=steps)
    assert order.steps_per_epoch == len(order.epoch(0)) == min(steps, len(expected[0]))
    assert as_lists(order, 1) == expected[1][:steps]
    assert sum(order.epoch(1).task_counts().values()) == order.steps_per_epoch


def hand_shuffle(items: list[Any], generator: random.Random) -> None:
    """Fisher-Yates from the end with rejection sampling of raw bits, written without random.shuffle."""
    for last in range(len(items) - 1, 0, -1):
        while (chosen := generator.getrandbits((last + 1).bit_length())) > last:
            pass
        items[last], items[chosen] = items[chosen], items[last]


def test_golden_for_seed_42() -> None:
    # 7 rows of "a", 9 of "b"; 2 ranks; batches of 2: a = 4 batches (the last short), b = 5 (one dropped).
    generator = random.Random(42)
    a, b = list(range(7)), list(range(9))
    hand_shuffle(a, generator)
    hand_shuffle(b, generator)
    groups = [(a[0:2], a[2:4]), (a[4:6], a[6:7]), (b[0:2], b[2:4]), (b[4:6], b[6:8])]
    hand_shuffle(groups, generator)
    epoch = Order({"a": 7, "b": 9}, ranks=2, batch_size=2, seed=42).epoch(0)
    assert [tuple(list(epoch.batch(s, r).rows) for r in (0, 1)) for s in (0, 1, 2, 3)] == groups
    # The same, literally, so that neither a changed generator nor a changed test goes unnoticed.
    assert [
        (epoch.task(s), epoch.batch(s, 0).rows, epoch.batch(s, 1).rows) for s in (0, 1, 2, 3)
    ] == GOLDEN_42


GOLDEN_42 = [
    ("a", (6, 0), (5,)),
    ("b", (3, 7), (8, 0)),
    ("b", (4, 6), (5, 1)),
    ("a", (1, 3), (4, 2)),
]


def test_the_generator_goes_on_into_the_next_epoch_and_its_state_is_kept() -> None:
    order = Order({"a": 9}, ranks=1, batch_size=1, seed=5)
    first, second = order.epoch(0), order.epoch(1)
    assert first.rng_state == random.Random(5).getstate()
    assert [first.batch(s, 0) for s in range(9)] != [second.batch(s, 0) for s in range(9)]
    generator = random.Random(0)
    generator.setstate(second.rng_state)
    numbers = list(range(9))
    generator.shuffle(numbers)
    steps = list(range(9))
    generator.shuffle(steps)
    assert [second.batch(s, 0).rows[0] for s in range(9)] == [numbers[step] for step in steps]


def test_far_epochs_do_not_depend_on_how_they_are_reached() -> None:
    there = Order({"a": 13, "b": 8}, ranks=2, batch_size=3, seed=1)
    straight = as_lists(there, 7)
    order = Order({"a": 13, "b": 8}, ranks=2, batch_size=3, seed=1)
    for index in (3, 3, 0, 9, 7):
        last = as_lists(order, index)
    assert last == straight
    assert order.epoch(7) is order.epoch(7)


def test_general_mix_has_the_figures_of_the_release_and_is_planned_fast() -> None:
    rows = {task: manifest_rows(task) or 0 for task in GENERAL}
    assert sum(count // 4 for count in rows.values()) == 220_220
    started = time.process_time()  # of this process: what else the machine does is not the plan's time
    order = Order(rows, ranks=4, batch_size=1, seed=42)
    epoch = order.epoch(0)
    seconds = time.process_time() - started
    sys.stdout.write(f"general mix: {len(epoch)} steps planned in {seconds:.2f} s\n")
    assert order.steps_per_epoch == len(epoch) == 220_220
    assert seconds < 3
    assert epoch.task_counts() == {task: count // 4 for task, count in rows.items()}
    assert order.dropped_rows == {task: count % 4 for task, count in rows.items()}
    assert len(epoch.batch(220_219, 3).rows) == 1


def test_an_epoch_of_the_general_mix_is_compact() -> None:
    rows = {task: manifest_rows(task) or 0 for task in GENERAL}
    order = Order({task: count // 10 for task, count in rows.items()}, ranks=4, batch_size=1, seed=42)
    tracemalloc.start()
    order.epoch(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    items = sum(count // 10 for count in rows.values()) + order.steps_per_epoch
    assert peak < 8 * items + 200_000  # 4 bytes an item; a list would take 36


def test_browsecomp_has_302_steps() -> None:
    rows = manifest_rows("browsecomp_textmas")
    assert rows == 1211
    assert Order({"b": rows}, ranks=4, batch_size=1, seed=42).steps_per_epoch == 302


def test_outside_is_an_index_error() -> None:
    epoch = Order({"a": 6}, ranks=2, batch_size=1, seed=0, steps_per_epoch=2).epoch(0)
    assert isinstance(epoch.batch(1, 1), Batch)
    for step, rank in ((2, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(IndexError, match="expected 0 to 1"):
            epoch.batch(step, rank)
    with pytest.raises(IndexError):
        Order({"a": 6}, ranks=2, batch_size=1, seed=0).epoch(-1)


def test_too_few_rows_are_refused_with_the_figures() -> None:
    with pytest.raises(DataError, match=r"no task has the 7 rows .*run\.ranks = 4.*flan 6.*Add rows"):
        Order({"flan": 6}, ranks=4, batch_size=2, seed=0)
    assert Order({"flan": 7}, ranks=4, batch_size=2, seed=0).steps_per_epoch == 1
    with pytest.raises(ValueError, match="ranks = 0"):
        Order({"flan": 6}, ranks=0, batch_size=2, seed=0)
