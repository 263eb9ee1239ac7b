"""The routes, a file a resource."""

from fastapi import APIRouter

from . import ask

ROUTERS: tuple[APIRouter, ...] = (ask.router,)

__all__ = ["ROUTERS"]
