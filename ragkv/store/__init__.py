"""Stores entries. Knows nothing of transformers.

An `Entry` is the KV of one run of tokens, without positions; its `Identity` decides who may use it.
A `Store` is a stack of tiers that holds entries and leases them for reading.

Nothing is imported here: policies and the writer's lock need no torch, so each module is imported
from its own place.
"""
