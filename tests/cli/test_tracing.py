"""Traces of commands, which the environment asks for."""

import subprocess
import sys
from pathlib import Path

import pytest

from ragkv.cli.app import start_tracing

from .conftest import Run
from .test_two_processes import DRIVER


def test_a_command_exports_its_spans_where_the_environment_says(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    assert run("ingest", documents).code == 0
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    command = [sys.executable, "-c", DRIVER, "ask", "Who founded Marl?", "--max-new-tokens", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    for name in ("ragkv.ask", "ragkv.retrieve", "ragkv.request", "ragkv.decode"):
        assert f'"name": "{name}"' in ran.stdout
    assert '"ragkv.prompt_tokens"' in ran.stdout


@pytest.mark.parametrize("exporter", [None, "none"])
def test_without_an_exporter_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch, exporter: str | None) -> None:
    if exporter is None:
        monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    else:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    start_tracing()


def test_a_missing_sdk_is_said_and_the_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    start_tracing()
    assert "opentelemetry-sdk is not installed" in capsys.readouterr().err


def test_an_exporter_that_no_package_has_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nonsense")
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: provider.shutdown())
    start_tracing()
    assert "names 'nonsense', but no installed package has this exporter" in capsys.readouterr().err
