"""A server of objects that is started once, for the tests that ask for it; Redis is in
`tests/conftest.py`.
"""

from collections.abc import Iterator

import pytest
import pytest_socket

from .remote.servers import S3Server, with_credentials


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    # the first test that asks for this fixture may be one that forbids sockets
    pytest_socket.enable_socket()
    with_credentials()
    with S3Server() as server:
        yield server
