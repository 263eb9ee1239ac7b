"""Shared fixtures: one thread, no network, tiny models. Tests of generated cases have no time limit of their own."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine must not fail a test
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
