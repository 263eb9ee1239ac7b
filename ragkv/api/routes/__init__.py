"""The routes, one file per resource."""

from fastapi import APIRouter

from . import ask, chat, collections, embeddings, models, sessions, stats

ROUTERS: tuple[APIRouter, ...] = (
    chat.router,
    ask.router,
    collections.router,
    embeddings.router,
    models.router,
    sessions.router,
    stats.router,
)

__all__ = ["ROUTERS"]
