"""Weights handed over in memory are the announced version, or they are read from its directory."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ramify.core.errors import DeadlineExceeded, WeightsRefused, WeightsReplaced
from ramify.infer import weight_loader
from ramify.infer.weight_loader import WeightLoader
from ramify.model import publish_weights
from ramify.model.weight_buffer import Announcement, WeightBuffer, compute_buffer_checksum, withdraw_announcements
from ramify.model.weights import get_untied_tensors
from ramify.trace import PolicyVersion

VERSION, NEXT_VERSION = PolicyVersion("p", 1, 7), PolicyVersion("p", 1, 8)
NAME = "1-000007"


def make_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False))


def announce(directory: Path, module: nn.Module, version: PolicyVersion = VERSION, name: str = NAME) -> WeightBuffer:
    buffer = WeightBuffer(get_untied_tensors(module), directory, version.incarnation)
    buffer.announce(version, name)
    return buffer


def assert_same(tensors, module: nn.Module) -> None:
    expected = get_untied_tensors(module)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@settings(max_examples=50, deadline=None)
@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), data=st.data())
def test_a_changed_word_and_two_exchanged_words_change_the_checksum(words, data):
    changed = list(words)
    index, other = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    changed[index], changed[other] = changed[other], changed[index]
    if changed == words:
        changed[index] ^= data.draw(st.integers(1, 2**62))
    checksums = [compute_buffer_checksum(torch.tensor(part).view(torch.uint8)) for part in (words, changed)]
    assert checksums[0] != checksums[1]


def test_an_announced_version_is_copied_before_its_directory_exists(tmp_path):
    source, model = make_module(1), make_module(2)
    buffer = announce(tmp_path, source)
    loader = WeightLoader(model)
    staged = loader.stage(tmp_path / NAME)
    assert staged.version == VERSION
    assert_same(staged.tensors, source)
    for tensor in buffer.tensors.values():  # the next version does not change what was staged
        tensor.zero_()
    assert_same(staged.tensors, source)


def test_tensors_are_converted_to_the_dtype_of_the_model(tmp_path):
    source = make_module(1)
    announce(tmp_path, source)
    staged = WeightLoader(make_module().to(torch.bfloat16)).stage(tmp_path / NAME)
    assert_same(staged.tensors, source.to(torch.bfloat16))


@pytest.mark.promise
@pytest.mark.parametrize("damage", ["overwritten", "lost"])
def test_a_torn_or_lost_buffer_is_not_used_and_the_directory_is_waited_for(tmp_path, damage):
    source = make_module(1)
    buffer = announce(tmp_path, source)
    if damage == "overwritten":  # a trainer died while it wrote the next version
        buffer.tensors["0.bias"][1] += 1
    else:
        (tmp_path / "buffer-1.bin").unlink()
    writer = threading.Timer(0.2, publish_weights, (tmp_path / NAME, get_untied_tensors(source), VERSION))
    writer.start()
    staged = WeightLoader(make_module()).stage(tmp_path / NAME)
    writer.join()
    assert_same(staged.tensors, source)


def test_waiting_for_the_directory_ends_when_another_version_is_announced_and_has_a_timeout(tmp_path, monkeypatch):
    buffer = announce(tmp_path, make_module(1))
    buffer.tensors["0.bias"][1] += 1
    announcer = threading.Timer(0.2, buffer.announce, (NEXT_VERSION, "1-000008"))
    announcer.start()
    with pytest.raises(WeightsReplaced, match=r"p@1\.8 is announced now"):
        WeightLoader(make_module()).stage(tmp_path / NAME)
    announcer.join()
    with pytest.raises(WeightsReplaced, match=r"p@1\.8 is announced now"):
        WeightLoader(make_module()).stage(tmp_path / NAME)
    buffer.tensors["0.bias"][1] += 1
    monkeypatch.setattr(weight_loader, "DIRECTORY_TIMEOUT", 0.1)
    with pytest.raises(DeadlineExceeded, match="was announced but not written"):
        WeightLoader(make_module()).stage(tmp_path / "1-000008")


def test_an_announced_version_that_does_not_fit_the_model_is_refused(tmp_path):
    announce(tmp_path, nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 2)))
    with pytest.raises(WeightsRefused, match=r"1 unknown tensors \(1.bias\); 0.weight has shape \[4, 5\]"):
        WeightLoader(make_module()).stage(tmp_path / NAME)


def test_a_damaged_announcement_is_refused_and_a_missing_one_is_none(tmp_path):
    assert Announcement.read(tmp_path / NAME) is None
    announce(tmp_path, make_module())
    path = tmp_path / "announced-1.msgpack"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WeightsRefused, match="not a readable announcement"):
        WeightLoader(make_module()).stage(tmp_path / NAME)


def test_a_trainer_withdraws_only_what_those_before_it_announced(tmp_path):
    for incarnation in (1, 2, 3):
        announce(tmp_path, make_module(), PolicyVersion("p", incarnation, 7), f"{incarnation}-000007")
    withdraw_announcements(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["announced-3.msgpack", "buffer-3.bin"]
