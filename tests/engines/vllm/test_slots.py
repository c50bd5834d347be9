"""Which probe is in which slot: shared, replaced only while unused, invalid until fully written."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

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
    slots, written = made()
    for probe in (FIRST, SECOND, FIRST):
        slots.release(await slots.hold([probe]))
    assert written.count == 2
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
    slots, _ = made(slots=3)
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


async def leased(slots: Slots, probe: Probes) -> ProbeLease:
    """Of an answer that is read by this."""
    columns = await slots.hold([probe])
    [digest] = slots.digests(columns)
    return ProbeLease(Directive(answer=digest), READS, [], slots, columns)


async def test_an_answer_of_which_a_token_was_not_read_ends_with_the_reason() -> None:
    """What is read of each, and until when its slot is kept: test_answers.py."""
    slots, _ = made()
    lease = await leased(slots, FIRST)
    reading = lease.answer(output(ONSET, [4.0, 8.0, 0.0]), 2, first=True)
    assert reading is not None
    assert reading.trajectory.tolist() == [4.0, 8.0]
    again = lease.answer(output(None), 2)  # an output without a token
    assert again is not None
    assert again.tokens == reading.tokens == 1
    with pytest.raises(
        EngineError, match="1 of an answer's tokens were read where the model went on from 2"
    ):
        lease.answer(output(None), 3)
    assert ProbeLease(Directive(), READS, [], slots).answer(output(None), 5) is None


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
    old, new = (
        [Loaded(count, answer=answers) for count in counts] for counts in (fleet, [3] * len(fleet))
    )
    reads, bundles = answers and bool(fleet), cast(Any, old)
    without, room = slots_for(bundles), slots_for(bundles, answers=reads)
    assert room >= SLOTS
    slots, _ = made(room)
    before, after = [
        await slots.hold([probe for bundle in loaded for probe in bundle.probes])
        for loaded in (old, new)
    ]
    assert not set(before) & set(after)
    load = Mock()
    monkeypatch.setattr(VllmEngine, "load", load)
    monkeypatch.setattr(library, "refuse_another_model", Mock())
    for rows in ([], [Site.ATTENTION_HEAD]):  # for training it reads none
        library.load_engine(EngineOptions("model", engine="vllm"), bundles=bundles, rows=rows)
    asked = [(call.kwargs["slots"], call.kwargs["answers"]) for call in load.call_args_list]
    assert asked == [(room, reads), (without, False)]
    policies = SimpleNamespace(named={"a": replace(OBSERVE, recheck=answers)})
    options: Any = SimpleNamespace(bundles=dict(enumerate(old)), policies=policies)
    for gated in (True, False) if fleet else ():
        arguments = SimpleNamespace(worker_cls="auto", additional_config=None)
        front_end.read_by_default(arguments, options, {front_end.GATED: gated})
        plan: dict[str, Any] = {"sites": ["attention_head"], "slots": without}
        if answers and gated:
            plan |= {"slots": room, "answers": True}
        assert arguments.additional_config == {KEY: plan, front_end.GATED: gated}
