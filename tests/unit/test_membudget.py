"""Budgets that cannot be what was meant."""

import dataclasses

import pytest

from autotune import membudget
from autotune.errors import UsageError
from autotune.plan import Request
from autotune.probe import sources
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context, make_model
from autotune.units import GIB, parse_bytes
from autotune.virtual import cards

RTX_4090 = cards.device_info(cards.find("rtx-4090"), "virtual:rtx-4090")
REAL = dataclasses.replace(RTX_4090, name="cuda:0", label="NVIDIA GeForce RTX 4090")


@pytest.mark.parametrize("device", [RTX_4090, REAL])
def test_a_budget_above_the_devices_memory_is_refused(device):
    with pytest.raises(UsageError, match=r"40\.00 GiB is more than NVIDIA .* has: 23\.5"):
        membudget.decide(40 * GIB, device, None)


@pytest.mark.parametrize("device", [RTX_4090, REAL])
def test_all_of_the_devices_memory_may_be_asked_for(device):
    assert membudget.decide(device.total_bytes, device, None)[0] == device.total_bytes


def test_nothing_is_refused_where_the_devices_memory_is_not_known():
    device = dataclasses.replace(REAL, total_bytes=0, free_bytes=0)
    assert membudget.decide(40 * GIB, device, None)[0] == 40 * GIB


@pytest.mark.parametrize(("num_bytes", "hint"), [(22, "mean 22GiB"), (0, "bytes"), (-5, "bytes")])
def test_a_number_without_its_unit_is_asked_about(num_bytes, hint):
    with pytest.raises(UsageError, match=hint):
        membudget.check_asked(num_bytes)
    with pytest.raises(UsageError, match=hint):
        Request(
            model="m", dataset="d", space=SearchSpace.load("sft"), memory_budget_bytes=num_bytes
        )


def test_a_card_without_its_unit_is_asked_about():
    with pytest.raises(UsageError, match="Did you mean 24GiB"):
        cards.find("24")


def test_a_budget_of_ones_own_on_a_virtual_card_says_that_no_margin_is_kept():
    assert "margin of 5%" in membudget.own_budget_notice(20 * GIB, RTX_4090)
    assert membudget.own_budget_notice(None, RTX_4090) == ""
    assert membudget.own_budget_notice(20 * GIB, REAL) == ""


def test_a_folder_without_weights_is_told_from_one_with_some(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").touch()
    assert not sources.may_hold_weights(str(tmp_path))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert sources.may_hold_weights(str(tmp_path))
    assert sources.may_hold_weights("Qwen/Qwen3-0.6B")


def test_what_a_virtual_card_takes_beside_the_weights_is_its_context():
    for device, whose in ((RTX_4090, "the context takes"), (REAL, "PyTorch and TRL take")):
        with pytest.raises(UsageError, match=whose):
            membudget.check_occupied(GIB, 2 * GIB, device)
    for device, whose in ((RTX_4090, "of context."), (REAL, "of PyTorch and TRL.")):
        model = make_model(num_parameters=10**12)
        with pytest.raises(UsageError, match=rf"beside the 2.00 GiB {whose}"):
            membudget.check_weights(GIB, 2 * GIB, make_context(device=device, model=model))


def test_a_budget_as_the_memory_is_printed_is_all_of_it():
    t4 = cards.device_info(cards.find("t4"), "virtual:t4")
    asked = parse_bytes("14.56GiB")
    assert asked > t4.total_bytes
    assert membudget.decide(asked, t4, None)[0] == t4.total_bytes


def test_sizes_that_differ_are_printed_apart():
    with pytest.raises(UsageError, match=r"of 2\.000000 GiB is below .* 2\.000001 GiB\."):
        membudget.check_occupied(2 * GIB, 2 * GIB + 1000, REAL)


def test_a_larger_budget_is_a_hint_only_where_the_device_has_it():
    t4 = cards.device_info(cards.find("t4"), "virtual:t4")
    context = make_context(device=t4, model=make_model(num_parameters=8_000_000_000))
    with pytest.raises(UsageError) as caught:
        membudget.check_weights(3 * GIB, 0, context)
    # 4-bit weights would be smaller, but cannot be trained on without bfloat16.
    assert caught.value.hint == "Choose a smaller model, or a card with more memory."
    context = make_context(device=RTX_4090, model=make_model(num_parameters=8_000_000_000))
    with pytest.raises(UsageError) as caught:
        membudget.check_weights(3 * GIB, GIB // 2, context)
    assert caught.value.hint == "Raise --memory-budget above 4.23 GiB, or choose a smaller model."
    with pytest.raises(UsageError) as caught:
        membudget.check_occupied(20 * GIB, 24 * GIB, RTX_4090)
    assert caught.value.hint == "Choose a card with more memory."


def test_a_quantised_checkpoint_needs_no_bitsandbytes_to_be_small():
    model = make_model(num_parameters=8_000_000_000, quantized=True)
    context = make_context(device=RTX_4090, model=model, packages={"peft": "0.21.2"})
    membudget.check_weights(8 * GIB, 0, context)
