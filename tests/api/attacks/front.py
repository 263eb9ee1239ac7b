"""The shipped nginx in front of a server, on a free port."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.servers import free_port
from tests.scheduling.helpers import until

SHIPPED = Path(__file__).parents[3] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed: apt-get install nginx-light"
)
SECOND = ("# server", "server")  # as docs/scale.md changes the file for a second server
# the environment of a server that stands behind it
BEHIND = {"RAGKV_SERVE__PROXIES": '["127.0.0.1"]'}


@contextmanager
def nginx(folder: Path, *servers: int, **changes: str) -> Iterator[int]:
    """The port on which nginx listens, in front of one or two servers. `changes` are other values
    of directives, such as `client_body_timeout="1s"`.
    """
    port = free_port()
    text = SHIPPED.read_text("utf-8")
    if len(servers) == 2:
        text = text.replace(*SECOND)
    for number, server in enumerate(servers):
        text = text.replace(f"server 127.0.0.1:800{number} ", f"server 127.0.0.1:{server} ")
    for name, value in {"listen": f"127.0.0.1:{port}", **changes}.items():
        lines = text.splitlines()
        [at] = [
            number
            for number, line in enumerate(lines)
            if line.strip().startswith(f"{name} ") and ";" in line
        ]
        text = "\n".join([*lines[:at], f"{name} {value};", *lines[at + 1 :]])
    if os.geteuid() == 0:  # its workers would have no right to the test's folder
        text = f"user root;\n{text}"
    file = folder / "nginx.conf"
    file.write_text(text.replace("/tmp/", f"{folder}/"), "utf-8")
    process = subprocess.Popen(
        [str(NGINX), "-e", "stderr", "-c", str(file)], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: _is_open(port), 30.0, 0.05)  # nginx listens
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
