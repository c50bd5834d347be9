"""The real service with the demo model is killed while labels arrive: none that it acknowledged is lost."""

from __future__ import annotations

import pytest

from tests.feedback.killing import a_database, run


@pytest.mark.parametrize(
    ("with_postgres", "posts", "clients"),
    [
        pytest.param(False, 400, 50, id="sqlite"),
        pytest.param(False, 10_000, 1_000, id="sqlite-1000", marks=pytest.mark.long),
        pytest.param(False, 10_000, 10_000, id="sqlite-10000", marks=pytest.mark.long),
        pytest.param(True, 10_000, 1_000, id="postgresql-1000", marks=pytest.mark.long),
        pytest.param(True, 10_000, 10_000, id="postgresql-10000", marks=pytest.mark.long),
    ],
)
def test_nothing_that_was_acknowledged_is_lost(with_postgres: bool, posts: int, clients: int) -> None:
    with a_database(with_postgres) as (where, crash):
        outcome = run(where, posts, clients, crash)
    assert outcome.lost == 0, outcome
    assert outcome.acknowledged >= posts // 2, outcome
    assert outcome.written >= outcome.acknowledged, outcome
    assert outcome.after == posts - outcome.acknowledged, outcome  # it goes on where it was
    assert outcome.repeated == outcome.written - outcome.acknowledged, outcome
    assert outcome.labels == posts, outcome
