"""The soak: replicas under mixed load, killed and replaced, while all they acknowledged is
verified.
"""
