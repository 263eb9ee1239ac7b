"""An engine's sessions, of the kind that its settings ask for."""

from pathlib import Path

from ragkv.config import EngineConfig
from ragkv.model.layout import TemplateRuns
from ragkv.prompt import Prefiller
from ragkv.prompt.history import BlockWriter

from .local import LocalSessions
from .manifest import Manifests
from .registry import Sessions

UNTOLD = "deletions-untold.json"  # keys of deleted entries that the other replicas were not told of yet


def open_sessions(
    prefiller: Prefiller, runs: TemplateRuns, block_writer: BlockWriter, config: EngineConfig
) -> Sessions:
    """Shared sessions on the store's Redis server, or local ones: on disk if the store may write to a directory."""
    settings, identity = config.store, block_writer.base
    if config.session.shared:
        from ragkv.store.remote import Tombstones, secret_from_environment

        from .shared import SharedSessions
        from .shared_manifest import SharedManifests  # imports redis-py

        assert settings.redis is not None  # `EngineConfig` refuses shared sessions without a server
        shared = SharedManifests(settings.redis, identity, secret_from_environment(settings.redis))
        writes = settings.directory is not None and not settings.read_only
        untold = Path(settings.directory) / UNTOLD if writes and settings.directory else None
        return SharedSessions(prefiller, runs, block_writer, config.session, shared, Tombstones(untold))
    durable = settings.directory is not None and not settings.read_only
    manifests = Manifests(settings.directory, identity) if durable and settings.directory else None
    return LocalSessions(prefiller, runs, block_writer, config.session, manifests)


__all__ = ["open_sessions"]
