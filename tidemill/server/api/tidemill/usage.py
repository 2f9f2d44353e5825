"""`/v1/usage`: the ledger of the machine's time."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from tidemill.server.generation.models import Models
from tidemill.server.http.access import Access, Forbidden


def make_router(models: Models, access: Access) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/usage")
    async def usage(request: Request) -> dict[str, Any]:
        """Tells whose requests the machine's time went to: all rows for an admin, or for a sole
        key; else the caller's own."""
        caller, tenant = request.state.caller, None
        try:
            access.check_may_see_all(caller)
        except Forbidden:
            tenant = caller.tenant
        return models.usage.body(tenant, has_keys=bool(access.keys or access.admin_keys))

    return router
