"""Attacks on a server in its own process, each with a bystander who uses it at the same time."""
