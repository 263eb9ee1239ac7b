"""A bounded number of slots for requests on the event loop, shared fairly: no tenant holds them all."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NoSlotError(Exception):
    """No slot became free in time."""


class FairSlots:
    """At most `total` holders, and `per_tenant` of one tenant. A free slot goes to the waiting tenants in turn."""

    def __init__(self, total: int, per_tenant: int) -> None:
        self._total, self._per_tenant = total, per_tenant
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the tenant whose turn is next comes first

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(map(len, self._waiting.values()))

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
        self._waiting.setdefault(tenant, deque()).append(granted)
        self._grant()
        try:
            async with asyncio.timeout(wait_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():  # granted in the moment in which the wait ended
                self._release(tenant)
            else:
                self._leave(tenant, granted)
            if isinstance(error, TimeoutError):
                raise NoSlotError from None
            raise

    def _release(self, tenant: str) -> None:
        self._held -= Counter([tenant])  # drops a count of zero
        self._grant()

    def _leave(self, tenant: str, granted: "asyncio.Future[None]") -> None:
        self._waiting[tenant].remove(granted)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _grant(self) -> None:
        """Give free slots away, one tenant after the other."""
        while self.held < self._total:
            tenant = next((one for one in self._waiting if self._held[one] < self._per_tenant), None)
            if tenant is None:
                return
            queue = self._waiting.pop(tenant)
            self._held[tenant] += 1
            queue.popleft().set_result(None)
            if queue:
                self._waiting[tenant] = queue  # at the end: its next turn comes after the others'
