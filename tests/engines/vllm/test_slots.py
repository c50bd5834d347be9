"""Which probe is in which slot: shared, replaced only while unused, invalid until fully written."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from service.engines.base import EngineOptions
from service.engines.vllm.client import MERGED, ProbeLease, Slots
from service.engines.vllm.engine import SLOTS, VllmEngine, slots_for
from service.engines.vllm.wire import KEY, REPLACED, STALE, Directive, Plan
from service.errors import EngineError, ProbeReplaced, WeightsChanged
from service.library import engine as library
from service.policies.guard import OBSERVE
from service.readout import Geometry, Probes, Site
from service.vllm_plugin import front_end
from tests.engines import tiny

GEOMETRY = Geometry(num_layers=2, num_heads=2, head_dim=4, hidden_size=8)
FIRST, SECOND, THIRD, FOURTH = (
    tiny.probes(GEOMETRY, Site.ATTENTION_HEAD, seed) for seed in range(4)
)
RESIDUAL = tiny.probes(GEOMETRY, Site.RESIDUAL_STREAM, 4)
pytestmark = pytest.mark.anyio


class WorkerSlots:
    """Records what is written to the workers."""

    def __init__(self) -> None:
        self.probes: dict[tuple[Site, int], Probes] = {}
        self.count = 0
        self.broken = False

    async def __call__(self, index: int, probe: Probes) -> str:
        await asyncio.sleep(0)
        if self.broken:
            raise OSError("the worker has gone")
        self.count += 1
        self.probes[probe.site, index] = probe
        return f"{probe.site} {index} {self.count}"


def made(slots: int = 2, sites: tuple[Site, ...] = tuple(Site)) -> tuple[Slots, WorkerSlots]:
    written = WorkerSlots()
    return Slots(Plan(GEOMETRY, sites, slots, False), written), written


async def test_columns_are_the_payloads_and_a_probe_is_written_once_and_shared() -> None:
    slots, written = made()
    held = await asyncio.gather(*(slots.hold([FIRST, RESIDUAL, SECOND]) for _ in range(50)))
    assert held == [[0, 2, 1]] * 50
    assert written.count == 3
    attention, residual = Site
    assert written.probes == {
        (attention, 0): FIRST,
        (residual, 0): RESIDUAL,
        (attention, 1): SECOND,
    }


async def test_an_unused_slot_is_replaced_and_never_one_in_use() -> None:
    slots, written = made()
    held = await slots.hold([FIRST])
    slots.release(await slots.hold([SECOND]))
    assert await slots.hold([THIRD]) == [1]
    with pytest.raises(EngineError, match="attention_head.*additional-config"):
        await slots.hold([FOURTH])
    assert written.probes[Site.ATTENTION_HEAD, 0] is FIRST
    slots.release(held)
    assert await slots.hold([FOURTH]) == [0]
    slots.release([1])
    assert await slots.hold([SECOND]) == [1]
    slots, _ = made()
    for probe in (FIRST, SECOND, FIRST):
        slots.release(await slots.hold([probe]))
    assert await slots.hold([THIRD]) == [1]  # the least recently used goes first


async def test_a_failed_hold_holds_nothing_and_a_failed_write_leaves_the_slot_invalid() -> None:
    slots, written = made()
    with pytest.raises(EngineError):
        await slots.hold([FIRST, SECOND, THIRD])
    assert await slots.hold([FOURTH, THIRD]) == [0, 1]
    assert written.count == 4
    slots, written = made(slots=1)
    slots.release(await slots.hold([FIRST]))
    written.broken = True
    with pytest.raises(OSError, match="gone"):
        await slots.hold([SECOND])
    written.broken = False
    assert await slots.hold([FIRST]) == [0]  # written again
    assert written.count == 2


async def test_a_slot_that_another_server_took_is_written_again() -> None:
    slots, written = made()
    [column] = await slots.hold([FIRST])
    before = slots.digests([column])
    slots.forget([column])
    slots.release([column])
    [column] = await slots.hold([FIRST])
    assert written.count == 2
    assert slots.digests([column]) != before
    slots, written = made(slots=3)

    async def use(probe: Probes) -> None:
        [column] = await slots.hold([probe])
        await asyncio.sleep(0)
        assert written.probes[Site.ATTENTION_HEAD, column] is probe
        slots.release([column])

    await asyncio.gather(*(use(probe) for probe in (FIRST, SECOND, THIRD) * 20))
    assert written.count == 3
    with pytest.raises(EngineError, match="context probes.*'slots' of the key 'hallutracer'"):
        await slots.hold(Loaded(3).probes)
    assert await slots.hold(Loaded(2).probes) == [0, 1, 2]


def output(payload: list[float] | None, *later: list[float]) -> Any:
    """A request's output, to which vLLM has added later ones."""
    made = [
        None if numbers is None else np.array([numbers], np.float32)
        for numbers in (payload, *later)
    ]
    return SimpleNamespace(prompt_token_id_logprobs=made[0], **{MERGED: tuple(made[1:])})


READS = Plan(GEOMETRY, tuple(Site), 2, False, True)
ONSET = [0.0] * READS.payload


async def leased(slots: Slots, *probes: Probes) -> ProbeLease:
    """Of a prompt that is read by all but the last, and its answer by that."""
    *columns, answer = await slots.hold(probes)
    [digest] = slots.digests([answer])
    return ProbeLease(Directive(answer=digest), READS, columns, slots, [answer])


async def test_an_answer_s_slot_is_kept_until_it_ends_and_the_prompt_s_until_it_was_read() -> None:
    slots, written = made()
    lease = await leased(slots, FIRST, SECOND)
    with pytest.raises(EngineError, match="in use"):
        await slots.hold([THIRD])
    lease.prefill(output(ONSET), 3)
    slots.release(await slots.hold([THIRD]))
    assert written.probes[Site.ATTENTION_HEAD, 1] is SECOND
    for _ in range(2):
        lease.release()
    held = await slots.hold([FIRST, FOURTH])
    with pytest.raises(EngineError, match="in use"):
        await slots.hold([SECOND])
    assert sorted(held) == [0, 1]


async def test_the_mean_is_over_each_token_that_came_whatever_vllm_has_added_to_what() -> None:
    slots, _ = made()
    lease = await leased(slots, FIRST)
    assert lease.answer(output(ONSET), 1, first=True) is None
    assert lease.answer(output(None), 1) is None  # an output without a token
    reading = lease.answer(output([1.0, -2.0, 0.0]), 2)
    assert reading is not None
    assert (reading.tokens, reading.trajectory.tolist()) == (1, [1.0, -2.0])
    reading = lease.answer(output([2.0, 0.0, 0.0], [6.0, 5.0, 0.0]), 4)
    assert reading is not None
    assert (reading.tokens, reading.trajectory.tolist()) == (3, [3.0, 1.0])
    other = await leased(slots, FIRST)
    reading = other.answer(output(ONSET, [4.0, 8.0, 0.0]), 2, first=True)
    assert reading is not None
    assert reading.trajectory.tolist() == [4.0, 8.0]
    with pytest.raises(
        EngineError, match="1 of an answer's tokens were read where the model went on from 2"
    ):
        other.answer(output(None), 3)
    unread = ProbeLease(Directive(), READS, [], slots)
    assert unread.answer(output(None), 5) is None


async def test_an_answer_whose_probe_or_weights_were_replaced_ends_with_the_reason() -> None:
    slots, written = made()
    changes: list[int] = []
    slots.on_changed = lambda: changes.append(1)
    lease = await leased(slots, FIRST)
    with pytest.raises(ProbeReplaced):
        lease.answer(output([0.0, 0.0, REPLACED]), 2)
    lease.release()
    lease = await leased(slots, FIRST)
    assert written.count == 2, "it is not written again"
    with pytest.raises(WeightsChanged):
        lease.answer(output([0.0, 0.0, STALE]), 2)
    assert changes == [1]


async def test_unknown_sites_and_geometries_are_refused() -> None:
    slots, written = made(sites=(Site.ATTENTION_HEAD,))
    for probe, named in (
        (RESIDUAL, "residual_stream"),
        (tiny.probes(Geometry(3, 2, 4, 8)), "another model"),
    ):
        with pytest.raises(EngineError, match=named):
            await slots.hold([probe])
    assert written.count == 0
    assert await slots.hold([]) == []


SEEDS = itertools.count()


class Loaded:
    """A bundle of which only the number of context probes is known, and whether it has one of
    answers."""

    def __init__(self, context_probes: int, *, answer: bool = False) -> None:
        self.answer = object() if answer else None
        self.manifest = SimpleNamespace(
            context_probes=context_probes,
            readout=SimpleNamespace(site="attention_head"),
            model=SimpleNamespace(adapter=None),
            chat_template=SimpleNamespace(arguments=None),
            dtype="float32",
        )
        self.probes = [
            tiny.probes(GEOMETRY, seed=next(SEEDS)) for _ in range(1 + context_probes + answer)
        ]


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("fleet", [[], [0], [3], [0, 0], [1, 3], [3, 3], [0, 1, 2, 3]], ids=str)
async def test_there_is_room_for_larger_bundles_beside_those_they_replace(
    fleet: list[int], answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prompts of the old ones wait, and answers where they are read: in vLLM's own server
    where a policy asks."""
    old = [Loaded(count, answer=answers) for count in fleet]
    new = [Loaded(3, answer=answers) for _ in fleet]
    reads = answers and bool(fleet)
    room = slots_for(cast(Any, old), answers=reads)
    assert room >= SLOTS
    slots, _ = made(room)
    before = await slots.hold([probe for bundle in old for probe in bundle.probes])
    after = await slots.hold([probe for bundle in new for probe in bundle.probes])
    assert not set(before) & set(after)
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        VllmEngine, "load", lambda *_, slots, answers, **__: asked.append((slots, answers))
    )
    monkeypatch.setattr(library, "refuse_another_model", lambda *_: None)
    library.load_engine(EngineOptions("model", engine="vllm"), bundles=cast(Any, old))
    library.load_engine(
        EngineOptions("model", engine="vllm"), bundles=cast(Any, old), rows=[Site.ATTENTION_HEAD]
    )
    assert asked == [
        (room, reads),
        (slots_for(cast(Any, old)), False),
    ]  # for training it reads none
    if fleet:
        named = {"a": replace(OBSERVE, recheck=answers)}
        options: Any = SimpleNamespace(
            bundles=dict(enumerate(old)), policies=SimpleNamespace(named=named)
        )
        for served in (True, False):
            arguments = SimpleNamespace(worker_cls="auto", additional_config=None)
            plan = {"sites": ["attention_head"]}
            front_end.read_by_default(arguments, options, {front_end.GATED: served})
            own = (
                {"slots": room, "answers": True}
                if answers and served
                else {"slots": slots_for(cast(Any, old))}
            )
            assert arguments.additional_config == {KEY: plan | own, front_end.GATED: served}
