"""The connector's counts as vLLM reports them: in its log, and as Prometheus metrics of its server."""

from dataclasses import dataclass
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .counts import COUNTERS


@dataclass
class RagKVStats(KVConnectorStats):  # type: ignore[misc]
    """The counts of one report, by the names of `COUNTERS`."""

    def reset(self) -> None:
        """Begin again at 0."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: Any) -> Self:
        """Add the counts of `other`."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts for a line of vLLM's log."""
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class RagKVMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts as Prometheus counters: `vllm:ragkv_prompts_fused` and so on."""

    def __init__(self, *arguments: Any) -> None:
        """Takes what vLLM gives: its config, classes of metrics, and the names and values of their labels."""
        super().__init__(*arguments)
        self._counters = {
            name: self._counter_cls(name=f"vllm:ragkv_{name}", documentation=text, labelnames=self._labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one report of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(count)


__all__ = ["RagKVMetrics", "RagKVStats"]
