"""Which addresses mean this machine."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, can only mean this machine."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
