"""Replicas on Ray Serve: `ragkv serve --ray`, or `serve run examples/serve.yaml`.

A front of one process takes requests, asks a router of `ragkv.routing` for the best replica, and hands on what comes
back. Every replica is the whole service of `ragkv.api` over an engine of its own. They share `home` (documents, keys),
a Redis server (conversations, entries) and nothing else. Ray is imported in `ray_app.py` alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ray_app import application, run


def __getattr__(name: str) -> Any:
    if name in ("application", "run"):  # loads Ray
        from . import ray_app

        return getattr(ray_app, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["application", "run"]
