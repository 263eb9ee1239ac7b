"""Statistics of an engine: its model, its settings and what its store holds."""

from dataclasses import dataclass
from typing import Self

from .assembly import Parts
from .prompt import SharedModel
from .scheduling import QueueStats
from .store.tiers import RemoteStats, StoreStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is and holds."""

    architecture: str
    layers: int
    kv_bytes_per_token: int
    dtype: str  # of weights and KV: "float32", ...
    dtype_why: str  # why that one, in a sentence
    store: StoreStats
    queue: QueueStats
    # the server of shared conversations; None: they are not shared
    sessions: RemoteStats | None = None

    @property
    def remotes(self) -> dict[str, RemoteStats]:
        """The health of everything that replicas share: remote tiers by their kind, and
        "conversations".
        """
        tiers = {tier.kind: tier.remote for tier in self.store.tiers if tier.remote is not None}
        return tiers if self.sessions is None else {**tiers, "conversations": self.sessions}

    @property
    def away(self) -> tuple[str, ...]:
        """What does not answer: kinds of remote tiers, and "conversations" for the server that has
        their state.
        """
        return tuple(name for name, remote in self.remotes.items() if not remote.answers)

    @classmethod
    def of(cls, model: SharedModel, parts: Parts) -> Self:
        """The stats of an engine on `model` with these parts, now."""
        adapter = model.adapter
        return cls(
            architecture=adapter.config.model_type,
            layers=adapter.layer_count,
            kv_bytes_per_token=adapter.kv_bytes_per_token,
            dtype=model.identity.dtype,
            dtype_why=model.dtype_choice.why,
            store=parts.store.stats(),
            queue=parts.scheduler.stats(),
            sessions=parts.sessions.storage.stats(),
        )
