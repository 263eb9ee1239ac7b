"""Ends connections whose bodies arrive in very many small pieces.

Parsing a piece takes some 30 microseconds on the event loop, and six bytes on the wire are enough
for one. So a body of 32 MiB would hold every other request for minutes. nginx passes bodies on
whole. This module limits the pieces if there is no nginx.
"""

import logging
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

FREE_PIECES = 1000  # pieces that a body may have, whatever is in them ...
PIECE_BYTES = 512  # ... and the bytes for which it may have one more


class BoundedConnection(h11.Connection):
    """The server's side of a connection, which ends with a body that is in too small pieces."""

    def __init__(self, head_bytes: int | None, end: Callable[[], None]) -> None:
        """`end` closes the connection. A head may have `head_bytes`; `None`: as h11 says."""
        most = {} if head_bytes is None else {"max_incomplete_event_size": head_bytes}
        super().__init__(h11.SERVER, **most)
        self._end = end
        self._bytes_ahead = FREE_PIECES * PIECE_BYTES

    def next_event(self) -> Any:
        """The next event; pieces of a body are counted."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._bytes_ahead = FREE_PIECES * PIECE_BYTES
        elif isinstance(event, h11.Data):
            self._bytes_ahead += min(0, len(event.data) - PIECE_BYTES)
            if self._bytes_ahead < 0:
                self._end()
                return h11.NEED_DATA
        return event


class Protocol(H11Protocol):
    """uvicorn's protocol on such connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection(self.config.h11_max_incomplete_event_size, self._end)

    def _end(self) -> None:
        log.warning("A body came in too many small pieces, and its connection is closed.")
        self.transport.abort()
