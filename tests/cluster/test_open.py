"""Opening remote tiers from settings: which settings are refused, and that no secret stands in a
file.
"""

import importlib.util
import sys

import pytest

from ragkv import EngineConfig, StoreConfig
from ragkv.config import RedisConfig, S3Config
from ragkv.errors import ConfigError, MissingExtraError

from .helpers import remote_of

REDIS_URL = "redis://127.0.0.1"
OPEN = {"allow_no_secret": True}


def test_remote_tiers_are_configured_by_tables_and_by_the_environment() -> None:
    tables = {
        "store": {
            "redis": {"url": "redis://127.0.0.1:6379/0", "ttl_s": "none"},
            "s3": {"bucket": "b", **OPEN},
        }
    }
    config = EngineConfig.from_dict(tables).store
    assert config.redis == RedisConfig(url="redis://127.0.0.1:6379/0", ttl_s=None)
    assert config.s3 == S3Config(bucket="b", allow_no_secret=True)
    given = {
        "RAGKV_STORE__REDIS__URL": "rediss://[::1]:6380/1",
        "RAGKV_STORE__REDIS__TIMEOUT_S": "5",
    }
    assert EngineConfig.gather(None, given).store.redis == RedisConfig(
        url="rediss://[::1]:6380/1", timeout_s=5.0
    )
    assert StoreConfig().redis is None and StoreConfig().s3 is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "here:6379",
        "http://here",
        "redis://",
        "redis://user:word@here",
        "redis://here?password=word",
    ],
)
def test_a_url_that_is_malformed_or_holds_credentials_is_refused_without_repeating_it(
    url: str,
) -> None:
    with pytest.raises(ConfigError, match=r"store\.redis\.url") as found:
        RedisConfig(url=url)
    assert "word@" not in str(found.value) and "=word" not in str(found.value)


@pytest.mark.parametrize("change", [{"timeout_s": 0.0}, {"connections": 0}, {"group_bytes": 0}])
def test_a_number_out_of_range_is_refused_by_name(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        RedisConfig(url=REDIS_URL, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=next(iter(change))):
        S3Config(bucket="b", **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ttl_s"):
        RedisConfig(url=REDIS_URL, ttl_s=0.0)
    with pytest.raises(ConfigError, match="bucket"):
        S3Config()


@pytest.mark.parametrize(
    ("library", "connector", "config"),
    [
        ("redis", "redis_client", StoreConfig(redis=RedisConfig(url=REDIS_URL))),
        ("obstore", "s3_connector", StoreConfig(s3=S3Config(bucket="b", allow_no_secret=True))),
    ],
)
def test_a_missing_library_is_reported_in_one_sentence_with_the_pip_line(
    library: str, connector: str, config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("redis_client", "redis_connector", "s3_connector"):
        monkeypatch.delitem(sys.modules, f"ragkv.cluster.{name}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    extra = {"redis": "redis", "obstore": "s3"}[library]
    with pytest.raises(MissingExtraError, match=rf'pip install "ragkv\[{extra}\]"'):
        remote_of(config)
    assert importlib.util.find_spec(f"ragkv.cluster.{connector}") is not None


@pytest.mark.parametrize(
    "url", ["redis://10.0.0.7:6379/0", "rediss://cache.example.org", "redis://0.0.0.0"]
)
def test_a_server_that_other_machines_can_reach_needs_a_secret_unless_a_setting_says_otherwise(
    url: str,
) -> None:
    with pytest.raises(
        ConfigError, match=r"store\.redis\.secret_variable, or set store\.redis\.allow_no_secret"
    ):
        RedisConfig(url=url)
    with pytest.raises(
        ConfigError, match=r"store\.s3\.secret_variable, or set store\.s3\.allow_no_secret"
    ):
        S3Config(bucket="b", endpoint="http://10.0.0.7:9000")
    RedisConfig(url=url, secret_variable="OUR_SECRET")
    RedisConfig(url=url, allow_no_secret=True)
    S3Config(bucket="b", endpoint="http://localhost:9000")
    RedisConfig(url="redis://localhost:6379")
    RedisConfig(url="unix:///run/redis.sock")


def test_a_secret_that_is_short_or_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StoreConfig(redis=RedisConfig(url=REDIS_URL, secret_variable="OUR_SECRET"))
    monkeypatch.delenv("OUR_SECRET", raising=False)
    with pytest.raises(ConfigError, match="OUR_SECRET"):
        remote_of(config)
    monkeypatch.setenv("OUR_SECRET", "short")
    with pytest.raises(ConfigError, match="OUR_SECRET"):
        remote_of(config)
