"""Threads and resources, below everything else: knows no model, no prompt and no store."""

from . import openmp
from .closing import Closing

__all__ = ["Closing", "openmp"]
