"""Model folders made once, engines closed at the end; records the results of the standard suites for their table."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from ragkv.integrations.langchain import close_engines

from .helpers import tiny_folder
from .standard_table import Suite, suite_of

results: dict[str, Suite] = defaultdict(Suite)  # of this session, by title


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    title = suite_of(report.nodeid)
    if title is not None:
        results[title].add(report.nodeid.rpartition("::")[2], report)


@pytest.fixture
def suites() -> dict[str, Suite]:
    return results


@pytest.fixture(scope="session", autouse=True)
def _engines() -> Iterator[None]:
    yield
    close_engines()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("other"), seed=8)
