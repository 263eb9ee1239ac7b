"""`python -m ragkv` is `ragkv`."""

from .cli import main

main()
