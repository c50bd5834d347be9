"""What the operator does to a running service."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.catalogue import bundle_list
from service.api.dependencies import Admin, State
from service.api.response_schema import BundleList, errors
from service.errors import NotFound, NotReady, ReloadFailed
from service.routes import RELOAD_ROUTE

router = APIRouter(tags=["admin"])
RESPONSES = errors(
    _401="no bearer key, or an unknown one",
    _403="the key may not administer, or there are no keys and the caller is not on this machine",
    _404="this service was not started by a command that can reload",
    _409="the bundles cannot be used; those that were loaded stay",
    _503="not ready: loading, or shutting down",
)


@router.post(RELOAD_ROUTE, responses=RESPONSES)
async def reload(state: State, _: Admin) -> BundleList:
    """Look the bundles up again and swap them; requests under way end with the bundle they began with."""
    if state.load_again is None:
        raise NotFound("this service cannot load its bundles again")
    try:
        await state.reload(state.load_again)
    except NotReady:
        raise
    except Exception as error:
        raise ReloadFailed(f"the bundles were not swapped, those that were loaded stay: {error}") from error
    return bundle_list(state)
