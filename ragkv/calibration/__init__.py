"""Measured once, applied by every request: quality gate, load profile, learned scores, answer metrics."""
