"""Weights that are copied from a trainer's memory are the announced version, or the engine knows that it has none."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ramify.core.errors import DeadlineExceeded, WeightsMissing, WeightsRefused, WeightsReplaced
from ramify.infer import weight_loader
from ramify.infer.weight_loader import WeightLoader
from ramify.model import publish_weights, weights
from ramify.model.shared_weights import (
    Announcement,
    MemoryUnreadable,
    SharedWeights,
    hold_announced,
    remove_announcements,
)
from ramify.model.weights import apply_weights, compute_tensor_checksum, get_untied_tensors
from ramify.trace import PolicyVersion
from tests.support.processes import wait_until

VERSION, NEXT_VERSION = PolicyVersion("p", 1, 7), PolicyVersion("p", 1, 8)
NAME, NEXT_NAME = "1-000007", "1-000008"


def make_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False))


def announce(directory: Path, module: nn.Module, version: PolicyVersion = VERSION, name: str = NAME) -> SharedWeights:
    shared = SharedWeights(get_untied_tensors(module), module, directory, version.incarnation)
    shared.announce(version, name)
    return shared


def assert_same(module: nn.Module, source: nn.Module) -> None:
    tensors, expected = get_untied_tensors(module), get_untied_tensors(source)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@settings(max_examples=50, deadline=None)
@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), data=st.data())
def test_a_changed_word_and_two_exchanged_words_change_the_checksum(words, data):
    changed = list(words)
    index, other = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    changed[index], changed[other] = changed[other], changed[index]
    if changed == words:
        changed[index] ^= data.draw(st.integers(1, 2**30))
    first, second = sorted(data.draw(st.integers(0, len(words))) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "CHECKSUM_WORDS", data.draw(st.sampled_from([3, 8, weights.CHECKSUM_WORDS])))
        checksums = [
            compute_tensor_checksum(
                [torch.tensor(part[:first], dtype=torch.int32), *map(torch.tensor, (part[first:second], part[second:]))]
            )
            for part in (words, changed)
        ]
    assert checksums[0] != checksums[1]


def test_a_model_gets_the_tensors_that_a_trainer_computes_with(tmp_path):
    source, model = make_module(1), make_module(2)
    shared = announce(tmp_path, source)
    assert all(tensor.data_ptr() == shared.tensors[name].data_ptr() for name, tensor in source.state_dict().items())
    loader = WeightLoader(model)
    for version, name in ((VERSION, NAME), (NEXT_VERSION, NEXT_NAME)):
        staged = loader.stage(tmp_path / name)
        assert staged.version == version
        apply_weights(model, staged)
        assert_same(model, source)
        shared.withdraw()
        with torch.no_grad():
            source[0].weight.mul_(2.0)  # an optimizer step changes the shared memory
        shared.announce(NEXT_VERSION, NEXT_NAME)
    assert not torch.equal(model[0].weight, source[0].weight)


def test_tensors_that_the_trainer_does_not_compute_with_are_copied_to_shared_memory(tmp_path):
    source, model = make_module(1), make_module(2)
    merged = {name: tensor.clone() for name, tensor in get_untied_tensors(source).items()}
    shared = SharedWeights(merged, source, tmp_path, 1)
    for factor in (1.0, 3.0):
        shared.withdraw()
        shared.copy_unshared_tensors((name, factor * tensor) for name, tensor in merged.items())
        shared.announce(VERSION, NAME)
        apply_weights(model, WeightLoader(model).stage(tmp_path / NAME))
        assert torch.equal(model[0].weight, factor * source[0].weight)


def test_tensors_are_converted_to_the_dtype_of_the_model(tmp_path):
    source, model = make_module(1), make_module().to(torch.bfloat16)
    announce(tmp_path, source)
    apply_weights(model, WeightLoader(model).stage(tmp_path / NAME))
    assert_same(model, make_module(1).to(torch.bfloat16))


@pytest.mark.promise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_change_while_they_are_copied_are_missing_not_mislabelled(tmp_path, dtype):
    source, model = make_module(1), make_module().to(dtype)
    shared, loader = announce(tmp_path, source), WeightLoader(model)
    staged = loader.stage(tmp_path / NAME)
    shared.tensors["0.bias"][1] += 1  # the trainer did not wait for this engine
    with pytest.raises(WeightsMissing, match=r"changed its memory while p@1\.7 was copied"):
        apply_weights(model, staged)


@pytest.mark.parametrize("reason", ["withdrawn", "lost", "known to the caller"])
def test_if_the_memory_cannot_be_read_the_directory_is_waited_for(tmp_path, reason):
    source, model = make_module(1), make_module()
    shared = announce(tmp_path, source)
    if reason == "withdrawn":
        shared.withdraw()
    elif reason == "lost":
        (tmp_path / "shared-1.bin").unlink()
    writer = threading.Timer(0.2, publish_weights, (tmp_path / NAME, get_untied_tensors(source), VERSION))
    writer.start()
    directory_reason = "a copy broke off" if reason.startswith("known") else ""
    staged = WeightLoader(model).stage(tmp_path / NAME, directory_reason=directory_reason)
    writer.join()
    assert staged.checksum is None
    apply_weights(model, staged)
    assert_same(model, source)


def test_a_version_is_checked_again_right_before_it_is_copied(tmp_path):
    shared = announce(tmp_path, make_module())
    with hold_announced(tmp_path / NAME):
        pass
    shared.withdraw()
    with pytest.raises(MemoryUnreadable, match="withdrawn"), hold_announced(tmp_path / NAME):
        pass
    shared.announce(NEXT_VERSION, NEXT_NAME)
    with pytest.raises(MemoryUnreadable, match="another version"), hold_announced(tmp_path / NAME):
        pass


@pytest.mark.promise
def test_weights_do_not_change_under_a_copy_that_began_just_before_they_were_withdrawn(tmp_path):
    shared = announce(tmp_path, make_module())
    withdrawal = threading.Thread(target=shared.withdraw)
    with hold_announced(tmp_path / NAME):
        withdrawal.start()
        wait_until(lambda: not read_announcement(tmp_path).is_current, "the version to be withdrawn")
        withdrawal.join(0.05)
        assert withdrawal.is_alive()
    withdrawal.join(30)
    assert not withdrawal.is_alive()


def test_a_trainer_waits_for_a_limited_time_until_weights_are_copied(tmp_path):
    module = make_module()
    shared = SharedWeights(get_untied_tensors(module), module, tmp_path, 1, copy_timeout=0.05)
    shared.announce(VERSION, NAME)
    with hold_announced(tmp_path / NAME):
        shared.withdraw()
    assert not read_announcement(tmp_path).is_current


def read_announcement(directory: Path) -> Announcement:
    announcement = Announcement.read(directory / NAME)
    assert announcement is not None
    return announcement


def test_waiting_for_the_directory_ends_when_another_version_is_announced_and_has_a_timeout(tmp_path, monkeypatch):
    shared = announce(tmp_path, make_module(1))
    shared.withdraw()
    announcer = threading.Timer(0.2, shared.announce, (NEXT_VERSION, NEXT_NAME))
    announcer.start()
    with pytest.raises(WeightsReplaced, match=r"p@1\.8 is announced now"):
        WeightLoader(make_module()).stage(tmp_path / NAME)
    announcer.join()
    with pytest.raises(WeightsReplaced, match=r"p@1\.8 is announced now"):
        WeightLoader(make_module()).stage(tmp_path / NAME)
    shared.withdraw()
    monkeypatch.setattr(weight_loader, "DIRECTORY_TIMEOUT", 0.1)
    with pytest.raises(DeadlineExceeded, match="was announced but not written"):
        WeightLoader(make_module()).stage(tmp_path / NEXT_NAME)


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


def test_a_trainer_removes_only_what_those_before_it_announced(tmp_path):
    for incarnation in (1, 2, 3):
        announce(tmp_path, make_module(), PolicyVersion("p", incarnation, 7), f"{incarnation}-000007")
    remove_announcements(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "announced-3.lock",
        "announced-3.msgpack",
        "shared-3.bin",
    ]
