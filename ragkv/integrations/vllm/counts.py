"""What the connector counts."""

import threading

COUNTERS = {
    "prompts_fused": "Prompts whose KV ragkv fused",
    "prompts_computed": "Prompts with chunks that vLLM computed after all",
    "tokens_reused": "Prompt tokens whose stored KV was used as it is",
    "tokens_recomputed": "Prompt tokens with stored KV that were computed again, selected by the selector",
    "tokens_computed": "Prompt tokens that ragkv computed because they had no stored KV",
    "bytes_read": "Bytes of stored KV that were read",
    "fusing_seconds": "Seconds from the arrival of prompts to their fused KV, summed",
    "writing_seconds": "Seconds spent on writing fused KV into the paged cache",
}


class Counts:
    """Counts by the names of `COUNTERS`, collected until they are taken."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Add `counts`, by their names."""
        with self._guard:
            for name, count in counts.items():
                assert name in COUNTERS, name
                self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """The counts so far; they begin again at 0."""
        with self._guard:
            counts, self._counts = self._counts, {}
        return counts


__all__ = ["COUNTERS", "Counts"]
