"""Which probe is in which slot: shared, replaced only while unused, invalid until fully written."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.engines.base import EngineOptions
from service.engines.vllm.engine import SLOTS, VllmEngine, slots_for
from service.engines.vllm.slots import Slots
from service.engines.vllm.wire import KEY, Plan
from service.errors import EngineError
from service.library import engine as library
from service.readout import Geometry, Probes, Site
from service.vllm_plugin import options
from service.vllm_plugin.front_end import read_by_default
from tests.engines import tiny

GEOMETRY = Geometry(num_layers=2, num_heads=2, head_dim=4, hidden_size=8)
pytestmark = pytest.mark.anyio


def probes(seed: int, site: Site = Site.ATTENTION_HEAD) -> Probes:
    return tiny.probes(GEOMETRY, site, seed)


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


async def test_columns_are_the_payloads() -> None:
    slots, written = made()
    first, second, residual = probes(1), probes(2), probes(3, Site.RESIDUAL_STREAM)
    assert await slots.hold([first, residual, second]) == [0, 2, 1]
    assert written.probes == {
        (Site.ATTENTION_HEAD, 0): first,
        (Site.RESIDUAL_STREAM, 0): residual,
        (Site.ATTENTION_HEAD, 1): second,
    }


async def test_a_probe_is_written_once_and_shared() -> None:
    slots, written = made()
    probe = probes(1)
    held = await asyncio.gather(*(slots.hold([probe]) for _ in range(50)))
    assert held == [[0]] * 50
    assert written.count == 1


async def test_an_unused_slot_is_replaced_and_never_one_in_use() -> None:
    slots, written = made()
    first, second, third, fourth = map(probes, range(4))
    held = await slots.hold([first])
    slots.release(await slots.hold([second]))
    assert await slots.hold([third]) == [1]
    with pytest.raises(EngineError, match="attention_head.*additional-config"):
        await slots.hold([fourth])
    assert written.probes[Site.ATTENTION_HEAD, 0] is first
    slots.release(held)
    assert await slots.hold([fourth]) == [0]
    slots.release([1])
    assert await slots.hold([second]) == [1]


async def test_the_least_recently_used_goes_first() -> None:
    slots, _ = made()
    first, second, third = map(probes, range(3))
    for probe in (first, second, first):
        slots.release(await slots.hold([probe]))
    assert await slots.hold([third]) == [1]


async def test_a_failed_hold_holds_nothing() -> None:
    slots, written = made()
    with pytest.raises(EngineError):
        await slots.hold([probes(1), probes(2), probes(3)])
    assert await slots.hold([probes(4), probes(5)]) == [0, 1]
    assert written.count == 4


async def test_a_slot_is_invalid_after_a_failed_write() -> None:
    slots, written = made(slots=1)
    first, second = probes(1), probes(2)
    slots.release(await slots.hold([first]))
    written.broken = True
    with pytest.raises(OSError, match="gone"):
        await slots.hold([second])
    written.broken = False
    assert await slots.hold([first]) == [0]  # written again
    assert written.count == 2


async def test_a_slot_that_another_server_took_is_written_again() -> None:
    slots, written = made()
    probe = probes(1)
    [column] = await slots.hold([probe])
    before = slots.digests([column])
    slots.forget([column])
    slots.release([column])
    [column] = await slots.hold([probe])
    assert written.count == 2
    assert slots.digests([column]) != before


async def test_concurrent_requests_get_their_own_probes() -> None:
    slots, written = made(slots=3)
    bundles = [probes(seed) for seed in range(3)]

    async def use(number: int) -> None:
        probe = bundles[number % 3]
        [column] = await slots.hold([probe])
        await asyncio.sleep(0)
        assert written.probes[Site.ATTENTION_HEAD, column] is probe
        slots.release([column])

    await asyncio.gather(*(use(number) for number in range(60)))
    assert written.count == 3


async def test_unknown_sites_and_geometries_are_refused() -> None:
    slots, written = made(sites=(Site.ATTENTION_HEAD,))
    with pytest.raises(EngineError, match="residual_stream"):
        await slots.hold([probes(1, Site.RESIDUAL_STREAM)])
    wrong = tiny.probes(Geometry(3, 2, 4, 8))
    with pytest.raises(EngineError, match="another model"):
        await slots.hold([wrong])
    assert written.count == 0
    assert await slots.hold([]) == []


class Loaded:
    """A bundle of which only the number of context probes is known."""

    def __init__(self, context_probes: int) -> None:
        self.manifest = SimpleNamespace(context_probes=context_probes, readout=SimpleNamespace(site="attention_head"))
        self.probes = [probes(next(SEEDS)) for _ in range(1 + context_probes)]


SEEDS = itertools.count()
FLEETS = [[0], [3], [0, 0], [1, 3], [3, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("fleet", FLEETS, ids=str)
async def test_bundles_are_replaced_by_larger_ones_while_prompts_of_the_old_ones_wait(fleet: list[int]) -> None:
    old, new = [Loaded(count) for count in fleet], [Loaded(3) for _ in fleet]
    slots, _ = made(slots_for(cast(Any, old)))
    before = await slots.hold([probe for bundle in old for probe in bundle.probes])
    after = await slots.hold([probe for bundle in new for probe in bundle.probes])
    assert not set(before) & set(after)


def test_an_engine_without_bundles_has_some_slots() -> None:
    assert slots_for([]) == SLOTS


@pytest.mark.parametrize("fleet", FLEETS, ids=str)
def test_the_library_and_vllms_own_server_make_room_alike(fleet: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bundles, asked = {str(n): Loaded(count) for n, count in enumerate(fleet)}, []
    monkeypatch.setattr(VllmEngine, "load", lambda *_, slots, **__: asked.append(slots))
    monkeypatch.setattr(library, "refuse_another_model", lambda *_: None)
    library.load_engine(EngineOptions("model", engine="vllm"), bundles=cast(Any, list(bundles.values())))
    monkeypatch.setattr(options, "read_options", lambda: SimpleNamespace(bundles=bundles))
    arguments = SimpleNamespace(worker_cls="auto", additional_config=None)
    read_by_default(arguments)
    assert arguments.additional_config[KEY] == {"sites": ["attention_head"], "slots": asked[0]}
    assert asked == [slots_for(cast(Any, list(bundles.values())))]


async def test_a_plan_with_too_few_slots_names_the_cure() -> None:
    slots, _ = made(slots=3)
    with pytest.raises(EngineError, match=r"context probes needs up to four.*\'slots\' of the key \'hallutracer\'"):
        await slots.hold(Loaded(3).probes)
    assert await slots.hold(Loaded(2).probes) == [0, 1, 2]
