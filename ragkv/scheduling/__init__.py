"""Who may compute, and when: admission, the compute lock, batched decoding."""

from .admission import AdmissionQueue, QueueStats, Ticket
from .compute_lock import Activity, ComputeLock, Waiter
from .decode_batch import DecodeBatch, DecodeSlot

__all__ = ["Activity", "DecodeBatch", "ComputeLock", "QueueStats", "AdmissionQueue", "DecodeSlot", "Ticket", "Waiter"]
