"""Measured once and applied to every request: quality gate, load profile, learned scores; and answer metrics."""
