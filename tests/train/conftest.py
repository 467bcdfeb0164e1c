"""Run with one thread: the models are small, and other tests share the machine."""

from pathlib import Path

import pytest
import torch

from ramify.model.precision import disable_tf32_convolutions
from tests.support.training import CONFIGS, build_model

disable_tf32_convolutions()  # as the process of a trainer does


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The directory of a small random model without a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "model"
    build_model(CONFIGS["llama"], "eager").save_pretrained(path)
    return path
