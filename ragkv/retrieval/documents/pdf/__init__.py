"""PDF to text."""

from .loading import load_pdf

__all__ = ["load_pdf"]
