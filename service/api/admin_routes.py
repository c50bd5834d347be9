"""What the operator does to a running service."""

from __future__ import annotations

from fastapi import APIRouter

from service.access.routes import RELOAD_ROUTE
from service.api.catalogue import bundle_list
from service.api.catalogue_schema import BundleList
from service.api.dependencies import Admin, TheService
from service.api.response_docs import errors
from service.errors import AuditUnavailable, NotFound, NotReady, ReloadFailed

router = APIRouter(tags=["admin"])
RESPONSES = errors(
    _401="no bearer key, or an unknown one",
    _403="the key does not have the scope admin, or there are no keys and the caller is not on this machine",
    _404="this service was not started by a command that can reload",
    _409="the keys or the bundles cannot be used; the message tells of each, and what cannot be used is as before",
    _503="not ready: loading, or shutting down; or the audit log cannot be written",
)


@router.post(RELOAD_ROUTE, summary="Load keys and bundles again", responses=RESPONSES)
async def reload(service: TheService, who: Admin) -> BundleList:
    """Read the keys again, look the bundles up again and swap them; requests under way end with what they began with.

    Of keys and bundles each is taken where it can be, whatever is wrong with the other.
    """
    if service.lifecycle.load_again is None:
        raise NotFound("this service cannot load its bundles again")
    keys, error = await service.reload(who)
    if keys is None and error is None:
        return bundle_list(service)
    bundles = f"not swapped, those that were loaded stay: {error}" if error is not None else "swapped"
    message = f"keys: {keys or 'as their file says'}; bundles: {bundles}"
    for kind in (NotReady, AuditUnavailable):  # what may be otherwise soon
        if isinstance(error, kind):
            raise kind(message)
    raise ReloadFailed(message)
