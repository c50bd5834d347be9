"""How many threads a forward pass takes: few beside busy neighbours, all that pay on a quiet
machine."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from service.demo import MODEL_DIR
from service.engines.base import EngineOptions
from service.engines.transformers.threads import (
    PATIENCE,
    AdaptiveThreads,
    Timings,
    threads_that_pay,
)
from service.library.engine import load_engine
from tests.engines import tiny

QUIET = {1: 1.3, 2: 1.0, 4: 0.7, 8: 0.65}
# as measured on two cores, and a guess beyond
TWO_BUSY_NEIGHBOURS = {1: 1.6, 2: 4.0, 4: 5.0, 8: 6.0}
HALVES_OF_ONE_CORE = dict.fromkeys((1, 2, 4, 8), 1.0)


def run(
    timings: Timings, counts: tuple[int, ...], seconds: dict[int, float], passes: int, noise: float
) -> list[int]:
    """The threads of each pass, where a pass takes ``seconds`` by its threads, more or less by
    ``noise``."""
    random.seed(passes)
    used = []
    for _ in range(passes):
        choice = timings.next()
        timings.add(choice, seconds[counts[choice]] * random.uniform(1 - noise, 1 + noise))
        used.append(counts[choice])
    return used


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, 4, 8), (1, 2, 3)])
def test_neighbours_come_and_go(counts: tuple[int, ...]) -> None:
    quiet, busy = (QUIET | {3: 0.9}), (TWO_BUSY_NEIGHBOURS | {3: 4.5})
    timings = Timings(counts, len(counts) - 1)

    def cost(seconds: dict[int, float], noise: float) -> float:
        """Of 1,000 passes, over that of the best number of threads for all of them."""
        used = run(timings, counts, seconds, 1000, noise)
        return sum(seconds[threads] for threads in used) / (
            1000 * min(seconds[count] for count in counts)
        )

    assert cost(quiet, 0.1) <= 1.05
    assert cost(busy, 0.2) <= 1.25
    cost(quiet, 0.1)  # neighbours have left: it takes some tries to see it
    assert cost(quiet, 0.1) <= 1.05


def test_on_two_cores_two_slow_passes_are_enough_and_at_the_start_one() -> None:
    timings = Timings((1, 2), 1)
    run(timings, (1, 2), QUIET, 200, 0.0)
    assert Counter(run(timings, (1, 2), TWO_BUSY_NEIGHBOURS, 10, 0.0)) == {1: 8, 2: 2}
    assert run(Timings((1, 2), 1), (1, 2), TWO_BUSY_NEIGHBOURS, 6, 0.1) == [2, 1, 1, 1, 1, 1]


def test_noise_does_not_decide_and_threads_that_do_not_pay_are_not_taken() -> None:
    for slower in (1.05, 1.08, 1.12):
        seconds = {1: slower, 2: 1.0}
        used = run(Timings((1, 2), 1), (1, 2), seconds, 4000, 0.1)
        assert sum(seconds[threads] for threads in used) / len(used) <= 1.009
    counts = (1, 2, 4, 8)
    timings = Timings(counts, 3)
    run(timings, counts, HALVES_OF_ONE_CORE, 500, 0.005)
    used = run(timings, counts, HALVES_OF_ONE_CORE, 500, 0.005)
    assert used.count(1) >= (1 - 2 / PATIENCE) * 500


@pytest.mark.parametrize(("seconds", "expected"), [(QUIET, 8), (TWO_BUSY_NEIGHBOURS, 1)])
def test_a_trial_chooses_the_threads_of_a_whole_run(
    seconds: dict[int, float], expected: int
) -> None:
    now, before = 0.0, torch.get_num_threads()

    def clock() -> float:
        nonlocal now
        now += seconds[torch.get_num_threads()]
        return now

    assert threads_that_pay(8, clock) == expected
    assert threads_that_pay(1, clock) == 1
    assert torch.get_num_threads() == before


def test_each_pass_has_its_threads_and_the_process_keeps_its_own() -> None:
    engine = tiny.load_engine(MODEL_DIR)
    own, model = torch.get_num_threads(), tiny.modules(engine).model
    between = list[int]()
    inside = list[int]()
    prompt = engine.tokenize("What is the capital of France?")
    probes = [tiny.probes_of(engine)]
    before = engine.score([prompt], probes)[0]
    torch.set_num_threads(3)
    try:
        model.register_forward_pre_hook(lambda *_: between.append(torch.get_num_threads()))
        adaptive = AdaptiveThreads(model, 2)
        model.register_forward_pre_hook(lambda *_: inside.append(torch.get_num_threads()))
        for first_token in [True, False] * 6:  # a whole pass, and one that ends at the last readout
            after = engine.score([prompt], probes, first_token=first_token)[0]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(own)
    assert inside[:2] == [2, 1]  # it begins with all, and tries fewer at once
    assert set(inside) == {1, 2}
    assert set(between) == {3}
    (timings,) = adaptive._sizes.values()
    assert all(timings._seconds)
    np.testing.assert_allclose(after.trajectories[0], before.trajectories[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("threads", "variable", "expected"),
    [(None, None, 5), (3, None, 3), (None, "1", 0), (3, "1", 3)],
)
def test_who_decides(
    threads: int | None, variable: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``expected``: the threads after loading; 5 is the quota, 0 what torch had."""
    adapted: list[int] = []
    monkeypatch.setattr("joblib.cpu_count", lambda: 5)
    monkeypatch.setattr(
        "service.engines.transformers.threads.AdaptiveThreads", lambda _, most: adapted.append(most)
    )
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        load_engine(EngineOptions(model=str(MODEL_DIR)), threads=threads).close()
        assert torch.get_num_threads() == (expected or before)
        assert adapted == ([5] if expected == 5 else [])
    finally:
        torch.set_num_threads(before)
