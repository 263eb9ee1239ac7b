"""The routes, one file per resource."""

from fastapi import APIRouter

from . import ask, chat, collections, embeddings, models, ollama, sessions, stats

ROUTERS: tuple[APIRouter, ...] = (
    chat.router,
    ask.router,
    collections.router,
    embeddings.router,
    models.router,
    ollama.router,
    sessions.router,
    stats.router,
)

__all__ = ["ROUTERS"]
