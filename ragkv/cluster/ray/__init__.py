"""Replicas on Ray Serve: `ragkv serve --ray`, or `serve run examples/serve.yaml`.

One front process takes every request, asks a router (`cluster/ray/routing.py`) for the best
replica, and forwards the request to it. Each replica is the whole service of `ragkv.api` with its
own engine. Replicas share `home` (documents, keys) and a Redis server (conversations, entries), and
nothing else. Only `ray_app.py` imports Ray.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ray_app import application, run


def __getattr__(name: str) -> Any:
    if name in __all__:  # loads Ray
        from . import ray_app

        return getattr(ray_app, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["application", "run"]
