"""A bounded number of slots for requests on the event loop, shared fairly: no tenant holds them all."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .fair_queue import FairQueue


class NoSlotError(Exception):
    """No slot became free in time."""


class FairSlots:
    """At most `total` holders, and `per_tenant` of one tenant. A free slot goes to the waiting tenants in turn."""

    def __init__(self, total: int, per_tenant: int) -> None:
        self._total, self._per_tenant = total, per_tenant
        self._held: Counter[str] = Counter()
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, tenant: str, wait_s: float) -> AsyncIterator[None]:
        """Hold a slot inside the block. Raises `NoSlotError` if none became free within `wait_s`."""
        await self._acquire(tenant, wait_s)
        try:
            yield
        finally:
            self._release(tenant)

    async def _acquire(self, tenant: str, wait_s: float) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, granted)
        self._grant()
        try:
            async with asyncio.timeout(wait_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():  # granted in the moment in which the wait ended
                self._release(tenant)
            else:
                self._waiting.remove(tenant, granted)
            if isinstance(error, TimeoutError):
                raise NoSlotError from None
            raise

    def _release(self, tenant: str) -> None:
        self._held -= Counter([tenant])  # drops a count of zero
        self._grant()

    def _grant(self) -> None:
        """Give free slots away, one tenant after the other."""
        while self.held < self._total:
            taken = self._waiting.take(lambda tenant: self._held[tenant] < self._per_tenant)
            if taken is None:
                return
            tenant, granted = taken
            if not granted.cancelled():  # its wait may have ended in this moment
                self._held[tenant] += 1
                granted.set_result(None)
