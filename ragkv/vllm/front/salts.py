"""Separates requests inside vLLM, by their `cache_salt` and by a proof of the tenant that a request
names.

vLLM's prefix cache gives a request the KV of earlier requests with the same salt and the same first
tokens. The connector makes the salt of each request narrower (`salted`). So tenants share no salt,
and fused KV is found only by requests that are fused in the same way. The server in front and the
connector trust each other by a secret in `SECRET_VARIABLE`.
"""

import hashlib
import hmac
import json
import os

# The environment variable with the shared secret.
SECRET_VARIABLE = "TENANT_SECRET"


def shared_secret() -> bytes:
    """The secret; empty: there is none, and no tenant is trusted."""
    return os.environ.get(SECRET_VARIABLE, "").encode()


def proof(secret: bytes, tenant: str, salt: str) -> str:
    """What proves that a request with this salt is of `tenant`: only who has the secret can make
    it.
    """
    return hmac.new(secret, json.dumps([tenant, salt]).encode(), "sha256").hexdigest()


def is_proved(secret: bytes, tenant: str, salt: str, given: str) -> bool:
    """Whether `given` is the proof; never without a secret."""
    return bool(secret) and hmac.compare_digest(
        proof(secret, tenant, salt).encode(), given.encode()
    )


def salted(*parts: object, secret: bytes = b"") -> str:
    """A salt that only these `parts` have; with a secret no one else can make it."""
    words = json.dumps([str(part) for part in parts]).encode()
    return hashlib.blake2b(words, digest_size=16, key=hashlib.sha256(secret).digest()).hexdigest()
