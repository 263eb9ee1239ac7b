"""The models, loaded once; an app and a client for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api import ServeConfig
from tests import tiny_models
from tests.reader import READER
from tests.toy_tokenizers import CHATML, VOCABULARY, byte_tokenizer

from .helpers import BARE, app_on, client_of
from .small_app import small_client


@pytest.fixture(scope="session")
def reader() -> Iterator[Engine]:
    """The small trained model, which answers with a word or two."""
    with Engine.from_pretrained(READER, BARE) as engine:
        yield engine


@pytest.fixture(scope="session")
def talker() -> Iterator[Engine]:
    """A model with random weights and a byte tokenizer, whose answers never end by themselves."""
    torch.manual_seed(7)
    config = tiny_models.config("llama", vocab_size=VOCABULARY, max_position_embeddings=8192)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = []  # no token ends an answer
    with Engine(model, byte_tokenizer(CHATML), BARE) as engine:
        yield engine


@pytest.fixture
def app(reader: Engine, tmp_path: Path) -> FastAPI:
    return app_on(reader, tmp_path)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with client_of(app) as client:
        yield client


@pytest.fixture
def talk(talker: Engine, tmp_path: Path) -> Iterator[TestClient]:
    """A client of the model that gives long answers."""
    with client_of(app_on(talker, tmp_path / "talks", model=str(tmp_path / "talker"))) as client:
        yield client


@pytest.fixture
def small(tmp_path: Path) -> Iterator[TestClient]:
    """A client of the small app, which has no model."""
    with small_client(ServeConfig(home=str(tmp_path))) as client:
        yield client
