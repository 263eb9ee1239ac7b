"""Decoding: one step of one prompt or of many, how tokens are chosen, and where an answer ends."""
