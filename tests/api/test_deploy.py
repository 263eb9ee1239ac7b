"""docs/api.md, docs/reference, Dockerfile, compose.yaml and the units of systemd agree with
the code.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from docs.reference.tables import DOCS, TABLES, table_of
from ragkv.api import server
from ragkv.api.settings import ServeConfig

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
NGINX = (ROOT / "deploy" / "nginx.conf").read_text("utf-8")
IGNORED = (ROOT / ".dockerignore").read_text("utf-8").splitlines()


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_in_the_docs_equal_the_code(name: str) -> None:
    path, make = TABLES[name]
    assert table_of(name, path.read_text("utf-8")) == make(), (
        "rewrite it: python -m docs.reference.tables"
    )


def test_every_error_code_in_the_docs_exists_in_the_code() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "ragkv" / "api").rglob("*.py"))
    table = (
        (DOCS / "api.md").read_text("utf-8").partition("| status | when |")[2].partition("\n\n")[0]
    )
    codes = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", table)
    assert len(codes) >= 5
    assert [code for code in codes if f'"{code}"' not in sources] == []


def test_environment_variables_of_image_and_compose_are_settings(compose: Any) -> None:
    image = dict(re.findall(r"\b(RAGKV_\w+)=(\S+)", DOCKERFILE))
    written = compose["services"]["ragkv"]["environment"]
    started = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for name, value in written.items()}
    config = ServeConfig.gather(environment={**image, **started})
    assert (config.host, config.home, config.log.format, config.model) == (
        "127.0.0.1",
        "/data",
        "json",
        "",
    )
    # it stands behind nginx: keys are needed
    assert config.on_loopback and config.proxies == ("127.0.0.1",)
    assert config.engine.store.memory_bytes == 1024**3


def test_base_images_are_pinned_by_digest(compose: Any) -> None:
    pinned = re.compile(r".*[\w.-]:[\w.-]+@sha256:[0-9a-f]{64}\}?")
    [base] = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", DOCKERFILE, re.MULTILINE)
    assert pinned.fullmatch(base) and pinned.fullmatch(compose["services"]["nginx"]["image"])


def test_the_packages_of_the_image_have_hashes_and_the_tested_versions() -> None:
    text = (ROOT / "deploy" / "requirements.txt").read_text("utf-8")
    tested = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE
        )
    )
    packages = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE
    )
    assert len(packages) == text.count("==") > 80
    assert {
        name: version for name, version, _ in packages if tested.get(name, version) != version
    } == {}


def test_files_that_the_image_copies_exist_and_are_not_ignored() -> None:
    for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in IGNORED


@pytest.mark.enable_socket
def test_nginx_ends_an_idle_connection_long_before_the_server() -> None:
    """Else it sends requests on connections that are being closed: it answers 503 and repeats
    nothing.
    """
    fakes = dict.fromkeys(("configure_logging", "sys", "_announce", "GracefulServer"), mock.DEFAULT)
    with mock.patch.multiple(server, **fakes) as of:
        server.serve(mock.MagicMock(), ServeConfig(port=0))
    of["GracefulServer"].return_value.run.call_args.kwargs["sockets"][0].close()
    ends_s = int(
        NGINX.partition("upstream ragkv")[2].partition("keepalive_timeout ")[2].partition("s;")[0]
    )
    assert 2 * ends_s <= of["GracefulServer"].call_args.args[0].timeout_keep_alive


def test_compose_publishes_on_loopback_and_lets_answers_finish(compose: Any) -> None:
    service = compose["services"]["ragkv"]
    vllm = yaml.safe_load((ROOT / "compose.vllm.yaml").read_text("utf-8"))
    assert service["ports"] == ["127.0.0.1:8000:8080"] and "listen 8080;" in NGINX
    front = compose["services"]["nginx"]
    assert front["network_mode"] == "service:ragkv" and "ports" not in front
    assert service["volumes"] == ["data:/data"] and "data" in compose["volumes"]
    for one in (service, front, *vllm["services"].values()):
        assert one["user"].split(":")[0] not in ("", "0") and one["mem_limit"] and one["pids_limit"]
        assert one["read_only"] is True and one["cap_drop"] == ["ALL"] and "ipc" not in one
    config = ServeConfig()
    assert f"client_max_body_size {config.limits.body_bytes >> 20}m;" in NGINX
    assert f"127.0.0.1:{config.port} " in NGINX
    assert int(service["stop_grace_period"].rstrip("s")) > config.graceful_s + config.close_s


def test_the_units_of_systemd_are_valid_and_let_answers_finish(tmp_path: Path) -> None:
    units = {path.name: path.read_text("utf-8") for path in (ROOT / "deploy").glob("*.service")}
    assert set(units) == {"ragkv.service", "ragkv-nginx.service"}
    lines = re.findall(r"^Environment=(.*)$", units["ragkv.service"], re.MULTILINE)
    variables = dict(one.split("=", 1) for line in lines for one in shlex.split(line))
    config = ServeConfig.gather(
        environment={k: v for k, v in variables.items() if k.startswith("RAGKV_")}
    )
    assert (config.home, config.log.format) == ("/var/lib/ragkv", "json")
    # it stands behind nginx: keys are needed
    assert config.on_loopback and config.proxies == ("127.0.0.1",)
    for name, text in units.items():
        assert (
            int(text.partition("\nTimeoutStopSec=")[2].split("\n")[0])
            > config.graceful_s + config.close_s
        )
        assert all(f"\n{bound}=" in text for bound in ("MemoryMax", "TasksMax"))
        assert re.search("\n(Dynamic)?User=", text)
        (tmp_path / name).write_text(
            re.sub(r"(?<=^ExecStart=)\S+", sys.executable, text, flags=re.MULTILINE)
        )
    if analyze := shutil.which("systemd-analyze"):
        command = [analyze, "verify", "--man=no", *(str(tmp_path / name) for name in units)]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""
