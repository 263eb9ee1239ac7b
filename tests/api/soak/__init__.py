"""The soak: replicas under mixed load, killed and replaced, while everything they acknowledged is verified.

make soak                  # an hour; make soak MINUTES=5
python -m tests.api.soak --minutes 5 --seed 2 --out runs/soak
"""
