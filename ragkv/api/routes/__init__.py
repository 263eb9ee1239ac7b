"""The routes, one file per resource."""

from fastapi import APIRouter

from . import ask, chat, collections, completions, embeddings, models, responses, sessions, stats

ROUTERS: tuple[APIRouter, ...] = (
    chat.router,
    completions.router,
    responses.router,
    ask.router,
    collections.router,
    embeddings.router,
    models.router,
    sessions.router,
    stats.router,
)

__all__ = ["ROUTERS"]
