"""Keys and bundles, read again by whoever asks."""

from __future__ import annotations

from service.audit.events import Who
from service.serving.keys import reload_keys
from service.serving.state import ServiceState


async def reload_all(state: ServiceState, who: Who) -> tuple[str | None, Exception | None]:
    """Read the file of keys and the bundles again, each whatever becomes of the other.

    Returns why the file of keys is not in force, and why the bundles were not swapped; None where they are.
    """
    await reload_keys(state, who)
    return state.keys.problem, await reload_bundles(state, who)


async def reload_bundles(state: ServiceState, who: Who) -> Exception | None:
    """Why they were not swapped, those that were loaded stay; None where they were.  Call where they can be."""
    assert state.load_again is not None
    try:
        await state.reload(state.load_again, who)
    except Exception as error:  # whatever is wrong with them
        return error
    return None
