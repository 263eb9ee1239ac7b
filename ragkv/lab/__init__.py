"""Measured once and applied to every request: quality gate, load profile; and answer metrics."""
