"""Fakes to test with: tiers that are slow, tiers that fail, and a network proxy that delays or damages bytes."""

from ragkv.store import WrappedLease

from .fakes import FailingTier, Failure, ThrottledTier, WrappedTier

__all__ = ["FailingTier", "Failure", "ThrottledTier", "WrappedLease", "WrappedTier"]
