"""API keys: shown once, stored as digests, noticed by a running server without a restart."""

import json
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv.api.keys import KeyFile, KeyRing, Principal, Quota, RateLimit, digest_of
from ragkv.api.server import check_network_exposure
from ragkv.api.settings import AuthConfig, ServeConfig
from ragkv.cli.app import app
from ragkv.errors import ConfigError, InputError


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "home" / "keys.json")


def test_a_key_is_stored_as_a_digest_and_found_by_its_text(file: KeyFile) -> None:
    secret, key = file.add("alice", rate=RateLimit(10, 1000), quota=Quota(documents=5))
    text = file.path.read_text()
    assert secret.startswith(f"rk-{key.id}-") and secret.removeprefix(f"rk-{key.id}-") not in text
    assert key.digest == digest_of(secret) and key.digest in text
    expected = Principal(key.id, "alice", key.id, Quota(documents=5), RateLimit(10, 1000))
    assert KeyRing(file.path).principal(secret) == expected


def test_only_the_owner_can_read_the_key_file(file: KeyFile) -> None:
    file.add("alice")
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [path.name for path in file.path.parent.iterdir() if path.suffix != ".lock"] == [
        "keys.json"
    ]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_key_file_that_others_may_write_to_is_refused(file: KeyFile, mode: int) -> None:
    file.add("alice")
    file.path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing(file.path)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda _: "",
        lambda key: key[:-1],
        lambda key: key[:-1] + ("A" if key[-1] != "A" else "B"),
        lambda key: key.upper(),
        lambda key: " " + key,
        lambda key: key.replace("rk-", "sk-"),
        lambda key: key[:3] + "0" * 12 + key[15:],
        lambda key: digest_of(key),
        lambda _: "rk-" + "é" * 56,
        lambda key: key + "\n",
    ],
)
def test_only_the_exact_key_text_is_accepted(file: KeyFile, wrong: Callable[[str], str]) -> None:
    (secret, _), (other, _) = file.add("alice"), file.add("bob")
    ring = KeyRing(file.path)
    assert ring.principal(secret) is not None
    assert (
        ring.principal(wrong(secret)) is None and ring.principal(secret[:16] + other[16:]) is None
    )


def test_a_running_server_notices_new_and_revoked_keys(file: KeyFile) -> None:
    ring = KeyRing(file.path)
    assert not ring.exists
    secret, key = file.add("alice")
    assert ring.exists
    assert ring.principal(secret) is not None
    other, _ = file.add("bob")
    assert ring.principal(other) is not None
    file.revoke(key.id)
    assert ring.principal(secret) is None
    assert ring.principal(other) is not None


def test_a_key_and_its_quota_are_of_one_state_of_the_file(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, key = file.add("alice", quota=Quota(documents=5))
    ring = KeyRing(file.path)
    now = time.time()

    def another_thread_reads_a_new_state() -> float:
        monkeypatch.undo()
        file.revoke(key.id)
        file.add("bob", tenant=key.tenant, quota=Quota(documents=7))
        assert ring.exists
        return now

    # the time is asked for between the look-ups of the key and of its quota
    monkeypatch.setattr("ragkv.api.keys.time.time", another_thread_reads_a_new_state)
    principal = ring.principal(secret)
    assert principal is not None and principal.quota == Quota(documents=5)
    assert ring.principal(secret) is None


def test_a_key_stays_required_after_the_last_is_revoked_or_the_file_is_removed(
    file: KeyFile,
) -> None:
    secret, key = file.add("alice")
    ring = KeyRing(file.path)
    file.revoke(key.id)
    assert ring.exists and ring.principal(secret) is None
    assert KeyRing(file.path).exists
    other, _ = file.add("bob")
    assert ring.principal(other) is not None
    file.path.unlink()
    assert ring.principal(other) is None
    assert ring.exists


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"keys": [{}], "quotas": {}}', '{"keys": 5, "quotas": {}}', "\xff"]
)
def test_a_damaged_key_file_raises_a_config_error(file: KeyFile, text: str) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(text.encode("latin-1"))
    file.path.chmod(0o600)
    with pytest.raises(ConfigError, match="keys"):
        file.read()


def test_an_expired_key_is_refused(file: KeyFile) -> None:
    short, _ = file.add("short", lifetime_s=0.0)
    long, _ = file.add("long", lifetime_s=1000.0)
    ring = KeyRing(file.path)
    assert ring.principal(short) is None
    assert ring.principal(long) is not None


@pytest.mark.parametrize(
    "tenant", ["", "..", "a/b", "A", "-a", "a" * 65, "a\n", "con.", ".hidden", "a b"]
)
def test_a_tenants_name_cannot_be_a_path(file: KeyFile, tenant: str) -> None:
    with pytest.raises(InputError, match="Tenant"):
        file.add("x", tenant=tenant)


def test_concurrently_added_keys_are_all_stored(file: KeyFile) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda name: file.add(name)[0], "abcdefgh"))
    ring = KeyRing(file.path)
    assert len(made) == 8 and all(ring.principal(secret) for secret in made)


def test_listening_beyond_loopback_needs_keys_or_no_auth(file: KeyFile) -> None:
    home = str(file.path.parent)
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        check_network_exposure(ServeConfig(host="0.0.0.0", home=home), KeyRing(file.path))
    check_network_exposure(ServeConfig(home=home), KeyRing(file.path))
    check_network_exposure(
        ServeConfig(host="::", auth=AuthConfig(required=False)), KeyRing(file.path)
    )
    file.add("alice")
    check_network_exposure(ServeConfig(host="0.0.0.0", home=home), KeyRing(file.path))


def test_the_command_line_shows_a_key_only_once(tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)]
    run = CliRunner().invoke
    made = run(app, ["keys", "add", "alice", "--documents", "5", "--rpm", "10", *home])
    assert made.exit_code == 0
    secret = next(line for line in made.output.splitlines() if line.startswith("rk-"))
    assert made.stdout.strip().splitlines()[-1] == secret
    principal = KeyRing(tmp_path / "keys.json").principal(secret)
    assert principal is not None and (
        principal.quota.documents,
        principal.rate.requests_per_minute,
    ) == (5, 10)
    listed = (
        run(app, ["keys", "list", *home]).output
        + run(app, ["keys", "list", "--json", *home]).output
    )
    assert principal.key_id in listed and "documents 5" in listed
    assert secret[16:] not in listed and digest_of(secret) not in listed
    other = json.loads(
        run(app, ["keys", "add", "alice", "--tenant", principal.tenant, "--json", *home]).stdout
    )
    assert run(app, ["keys", "revoke", principal.key_id, *home]).exit_code == 0
    ring = KeyRing(tmp_path / "keys.json")
    assert ring.principal(secret) is None and ring.principal(other["key"]) is not None
    assert isinstance(run(app, ["keys", "revoke", "nope", *home]).exception, InputError)
