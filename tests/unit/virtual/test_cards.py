"""Every card of the catalogue is whole and plausible; what may name one, and what may not."""

from __future__ import annotations

import contextlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import AutotuneError, PrerequisiteError, UnknownNameError, UsageError
from autotune.units import GIB, MIB
from autotune.virtual import cards

CARDS: dict[str, dict[str, Any]] = tomllib.loads(cards.CATALOGUE.read_text("utf-8"))["cards"]
OTHER_FIELDS = {"name", "aliases", "vendor", "architecture", "sources"}
CAPABILITY = {
    "pascal": {"6.0"},
    "volta": {"7.0"},
    "turing": {"7.5"},
    "ampere": {"8.0", "8.6"},
    "ada": {"8.9"},
    "hopper": {"9.0"},
    "blackwell": {"10.0", "10.3", "12.0"},
    "cdna2": {"gfx90a"},
    "cdna3": {"gfx942"},
}
DTYPES = {
    "pascal": {"fp32", "fp16"},
    "volta": {"fp32", "fp16"},
    "turing": {"fp32", "fp16"},
    "ampere": {"fp32", "tf32", "fp16", "bf16"},
    "ada": {"fp32", "tf32", "fp16", "bf16", "fp8"},
    "hopper": {"fp32", "tf32", "fp16", "bf16", "fp8"},
    "blackwell": {"fp32", "tf32", "fp16", "bf16", "fp8"},
    "cdna2": {"fp32", "fp16", "bf16"},
    "cdna3": {"fp32", "tf32", "fp16", "bf16", "fp8"},
}
NATURAL = {
    "T4": "t4",
    "Tesla T4": "t4",
    "V100": "v100-16gb",
    "v100-16gb": "v100-16gb",
    "V100 32GB": "v100-32gb",
    "RTX 2080 Ti": "rtx-2080-ti",
    "2080ti": "rtx-2080-ti",
    "RTX 3060 12GB": "rtx-3060-12gb",
    "rtx3060": "rtx-3060-12gb",
    "RTX 3080": "rtx-3080-10gb",
    "3090": "rtx-3090",
    "3090 Ti": "rtx-3090-ti",
    "RTX 3080 Ti": "rtx-3080-ti",
    "RTX 4070": "rtx-4070",
    "RTX 4060": "rtx-4060-8gb",
    "P100": "p100-16gb-pcie",
    "A2": "a2",
    "B300": "b300-288gb",
    "MI325X": "mi325x",
    "RTX 3090": "rtx-3090",
    "4060 Ti 16GB": "rtx-4060-ti-16gb",
    "RTX 4060 Ti": "rtx-4060-ti-16gb",
    "RTX 4070 Ti SUPER": "rtx-4070-ti-super",
    "4070-ti-s": "rtx-4070-ti-super",
    "rtx-4080": "rtx-4080",
    "rtx4090": "rtx-4090",
    "RTX_4090": "rtx-4090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "GeForce RTX 4090": "rtx-4090",
    "5070 Ti": "rtx-5070-ti",
    "5080": "rtx-5080",
    "RTX 5090": "rtx-5090",
    "A10": "a10",
    "A10G": "a10g",
    "A16": "a16",
    "A30": "a30",
    "A40": "a40",
    "RTX A4000": "rtx-a4000",
    "a5000": "rtx-a5000",
    "RTX A6000": "rtx-a6000",
    "6000 Ada": "rtx-6000-ada",
    "6000-ada": "rtx-6000-ada",
    "rtx6000-ada": "rtx-6000-ada",
    "RTX PRO 6000": "rtx-pro-6000-blackwell",
    "L4": "l4",
    "L40S": "l40s",
    "A100": "a100-80gb",
    "A100 40GB": "a100-40gb",
    "a100-40gb-pcie": "a100-40gb-pcie",
    "a100-pcie-40gb": "a100-40gb-pcie",
    "a100-sxm-40gb": "a100-40gb",
    "a100-pcie-80gb": "a100-80gb-pcie",
    "a100-sxm-80gb": "a100-80gb",
    "A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "H100": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h100-sxm-80gb": "h100-sxm-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "H100 NVL": "h100-nvl-94gb",
    "GH200": "gh200-96gb",
    "h200": "h200-sxm-141gb",
    "B200": "b200-180gb",
    "MI210": "mi210",
    "MI250X": "mi250x",
    "AMD Instinct MI300X": "mi300x",
}

each = pytest.mark.parametrize("card_id", sorted(CARDS))


# --- the catalogue ------------------------------------------------------------------------------


def test_ids_aliases_and_names_are_unique_however_they_are_written() -> None:
    words = [word for identity, card in CARDS.items() for word in (identity, *card["aliases"])]
    for word in words:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", word), word
    compact = [word.replace("-", "") for word in words]
    assert sorted(compact) == sorted(set(compact))
    names = [card["name"] for card in CARDS.values()]
    assert sorted(names) == sorted(set(names))


def test_no_name_of_one_card_means_another() -> None:
    for identity, card in cards.catalogue().items():
        for word in (identity, card.name, *card.aliases):
            assert cards.find(word) is card, word


@each
def test_every_field_is_given(card_id: str) -> None:
    assert set(CARDS[card_id]) == {*cards.SOURCE_OF, *OTHER_FIELDS}
    card = cards.catalogue()[card_id]
    assert card.id == card_id
    assert card.vendor == ("amd" if card.architecture.startswith("cdna") else "nvidia")
    assert card.compute_capability in CAPABILITY[card.architecture]
    assert card.supports_bf16 == (card.architecture not in ("pascal", "volta", "turing"))


@each
def test_every_figure_has_a_source(card_id: str) -> None:
    sources = CARDS[card_id]["sources"]
    assert set(sources) == set(cards.SOURCE_OF.values())
    for key, text in sources.items():
        assert len(text.strip()) >= 15, key


@each
def test_memory(card_id: str) -> None:
    card = CARDS[card_id]
    driver = card["driver_memory_mib"] * MIB
    assert 0.95 * driver <= card["memory_bytes"] <= driver
    assert 7 * GIB <= card["memory_bytes"] <= 288 * GIB
    assert 100 * MIB <= card["context_bytes"] <= 1024 * MIB
    # In GB or GiB: allow for both, and for what the driver keeps.
    told = re.search(r"-(\d+)gb", card_id)
    if told:
        assert 0.90 <= card["memory_bytes"] / (int(told[1]) * GIB) <= 1.01


@each
def test_gib_in_the_memory_source_agrees(card_id: str) -> None:
    """One of the GiB, MiB or byte figures that the source quotes is the one in the table."""
    card = CARDS[card_id]
    if "estimated" in card["sources"]["memory"]:
        return
    text = card["sources"]["memory"].replace(",", "")
    quoted = [float(gib) * GIB for gib in re.findall(r"(\d+\.\d+) Gi?B", text)]
    quoted += [int(mib) * MIB for mib in re.findall(r"(\d{4,6}) ?(?:MiB|MB)", text)]
    quoted += [int(number) for number in re.findall(r"(\d{11,12}) bytes", text)]
    assert any(abs(value - card["memory_bytes"]) <= 6 * MIB for value in quoted), quoted


@each
def test_rates(card_id: str) -> None:
    card = CARDS[card_id]
    tflops = card["tflops"]
    assert set(tflops) == DTYPES[card["architecture"]]
    assert all(type(rate) is float and 1 <= rate <= 10_000 for rate in tflops.values())
    if card["architecture"] == "pascal":
        # No matrix units: with FP32 accumulation its products run at the FP32 rate.
        assert tflops["fp32"] == tflops["fp16"]
        return
    assert tflops["fp32"] < tflops["fp16"]
    if "bf16" in tflops:
        assert tflops["bf16"] == tflops["fp16"]
    if "tf32" in tflops:
        assert tflops["tf32"] == pytest.approx(tflops["fp16"] / 2, rel=0.02)
    if "fp8" in tflops:
        assert tflops["fp8"] == pytest.approx(tflops["fp16"] * 2, rel=0.02)


@each
def test_rates_are_dense_and_fit_the_clock(card_id: str) -> None:
    """The FP32 rate gives a clock that a GPU can have; a sparse figure would not fit."""
    card = CARDS[card_id]
    capability = card["compute_capability"]
    if card["vendor"] == "amd":
        flops_per_clock = 256.0
        clock = card["tflops"]["fp32"] * 1e12 / card["multiprocessors"] / flops_per_clock
    else:
        lanes = 64 if capability in {"6.0", "7.0", "7.5", "8.0"} else 128
        clock = card["tflops"]["fp32"] * 1e12 / card["multiprocessors"] / lanes / 2
    assert 1.2e9 <= clock <= 2.8e9
    # Dense FP16 multiply-adds per multiprocessor and clock: a power of two, of the generation.
    ops = card["tflops"]["fp16"] * 1e12 / card["multiprocessors"] / clock
    sizes = (128,) if card["architecture"] == "pascal" else (512, 1024, 2048, 4096, 8192)
    assert min(abs(ops / size - 1) for size in sizes) <= 0.2


@each
def test_plausible_ranges(card_id: str) -> None:
    card = CARDS[card_id]
    assert 2e11 <= card["bandwidth_bytes_per_s"] <= 1e13
    assert 5e9 <= card["link_bytes_per_s"] <= 5e11
    assert card["link_bytes_per_s"] < card["bandwidth_bytes_per_s"]
    assert 10 <= card["multiprocessors"] <= 304
    assert 1 * MIB <= card["l2_bytes"] <= 256 * MIB


@each
def test_cublas_workspace_is_pytorchs_default(card_id: str) -> None:
    card = CARDS[card_id]
    capability = card["compute_capability"]
    if capability == "gfx942":
        want = 128 * MIB
    elif capability == "gfx90a" or capability.split(".")[0] in {"9", "10", "12"}:
        want = 32 * MIB
    else:
        want = 4096 * 1024 * 2 + 16 * 1024 * 8
    assert card["cublas_workspace_bytes"] == want


# --- what names a card --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "card_id"), NATURAL.items())
def test_a_natural_name_is_found(name: str, card_id: str) -> None:
    assert cards.find(name).id == card_id
    assert cards.find(f"  {name.upper()} ").id == card_id


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("24GB", 24 * 10**9), ("24 g", 24 * GIB)]
)
def test_a_size_is_a_card_with_an_a100s_rates(text: str, size: int) -> None:
    card, base = cards.find(text), cards.find("a100-80gb")
    assert (card.id, card.memory_bytes, card.driver_memory_mib) == (text, size, size // MIB)
    assert (card.tflops, card.capability) == (base.tflops, base.capability)
    assert card.sources["memory"] == "the size that was asked for"
    assert card.sources["bandwidth"].startswith("taken from a100-80gb: ")
    assert text in card.name


@pytest.mark.parametrize("text", ["1B", "100MiB", "0.2GiB"])
def test_a_size_below_the_context_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the context takes"):
        cards.find(text)


@pytest.mark.parametrize(
    ("name", "near"),
    [("rtx-409", "rtx-4090"), ("h100-sxn", "h100-sxm"), ("a-100-80gib", "a100-80gb")],
)
def test_an_unknown_name_names_near_ones(name: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown card {name!r}") as caught:
        cards.find(name)
    assert repr(near) in caught.value.hint


@pytest.mark.parametrize("name", ["-", "0", "24XB", "\u00b2GiB", "9" * 400])
def test_what_is_neither_name_nor_size_lists_known_ones(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        cards.find(name)
    assert "`autotune gpus` lists all cards" in caught.value.hint


def test_cards_are_counted_and_not_what_they_are_also_called() -> None:
    with pytest.raises(UnknownNameError) as caught:
        cards.find("nope")
    assert f"Nearest of {len(cards.catalogue())} known: " in caught.value.hint


@pytest.mark.parametrize("name", ["", " ", "0GiB", "-5GiB", "nanGiB", "99999999999999TiB"])
def test_a_size_that_cannot_be_is_called_one(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        cards.find(name)
    assert not isinstance(caught.value, UnknownNameError)
    assert caught.value.hint


@given(
    st.text() | st.text().map(lambda text: f"{text}.toml") | st.from_regex(r"[0-9.]+ ?[a-zA-Z]*")
)
def test_any_text_is_a_card_or_an_error_of_ours(name: str) -> None:
    for call in (cards.find, lambda text: cards.full_name(f"virtual:{text}")):
        with contextlib.suppress(AutotuneError):
            assert call(name)


# --- a card's file ------------------------------------------------------------------------------


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_takes_the_rest_from_its_base(tmp_path: Path) -> None:
    text = 'base = "4090"\nmemory_bytes = 51_000_000_000\n[sources]\nmemory = "my own card"\n'
    card, base = cards.find(write(tmp_path, text)), cards.find("rtx-4090")
    assert (card.id, card.name) == ("mine", "NVIDIA GeForce RTX 4090 as in mine.toml")
    assert (card.memory_bytes, card.tflops) == (51_000_000_000, base.tflops)
    assert card.aliases == ()
    assert card.sources["memory"] == "my own card"
    assert card.sources["l2"].startswith("taken from rtx-4090: ")


def test_a_whole_file_needs_no_base(tmp_path: Path) -> None:
    lines = [
        'name = "Mine"',
        'vendor = "amd"',
        'architecture = "rdna3"',
        'compute_capability = "gfx1100"',
        "multiprocessors = 96",
        "memory_bytes = 2.4e10",
        "driver_memory_mib = 24576",
        "context_bytes = 0",
        "l2_bytes = 0",
        "cublas_workspace_bytes = 0",
        "bandwidth_bytes_per_s = 960_000_000_000",
        "link_bytes_per_s = 3.15e10",
        "tflops = { fp32 = 61, fp16 = 122.0 }",
    ]
    card = cards.find(write(tmp_path, "\n".join(lines)))
    assert (card.memory_bytes, card.capability) == (24_000_000_000, (11, 0))
    assert card.sources["bandwidth"] == "given in mine.toml"
    with pytest.raises(UsageError, match=r"lacks cublas_workspace_bytes, l2_bytes\."):
        cards.find(write(tmp_path, "\n".join([*lines[:8], *lines[10:]])))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "rtx-409"', "unknown card 'rtx-409'"),
        ('base = "24GiB"', "is not in the catalogue"),
        ('base = "mine.toml"', "is not in the catalogue"),
        ("base = 7", "the base 7 .* is not in the catalogue"),
        ('base = "4090"\nmemory = 3', "mine.toml: unknown card field 'memory'"),
        ('base = "4090"\nid = "x"', "unknown card field 'id'"),
        ('base = "4090"\nname = ""', "name .* must be text"),
        ('base = "4090"\nvendor = 3', "vendor .* must be text"),
        ('base = "4090"\nmemory_bytes = "24GiB"', "memory_bytes .* not a positive number"),
        ('base = "4090"\nmemory_bytes = true', "memory_bytes .* not a positive number"),
        ('base = "4090"\nmemory_bytes = 0', "memory_bytes .* not a positive number"),
        ('base = "4090"\nmemory_bytes = inf', "memory_bytes .* not a positive number"),
        ('base = "4090"\nmemory_bytes = nan', "memory_bytes .* not a positive number"),
        (f'base = "4090"\nmemory_bytes = 1{"0" * 400}', "memory_bytes .* not a positive number"),
        ('base = "4090"\ncontext_bytes = -1', "context_bytes .* not a positive number"),
        ('base = "4090"\nmemory_bytes = 1000', "mine.toml has 1,000 bytes of memory"),
        ('base = "4090"\ntflops = 3', "tflops .* must map dtypes to numbers"),
        ('base = "4090"\ntflops = { fp32 = "x" }', "tflops .* must map dtypes to numbers"),
        ('base = "4090"\ntflops = { fp32 = nan }', "tflops .* must map dtypes to numbers"),
        ('base = "4090"\ntflops = { fp32 = 1, bf61 = 2 }', "unknown dtype 'bf61'"),
        ('base = "4090"\ntflops = { bf16 = 2 }', "lacks fp32"),
        ('base = "4090"\naliases = "x"', "aliases .* must be a list"),
        ('base = "4090"\naliases = [1]', "aliases .* must be a list"),
        ('base = "4090"\nsources = 3', "sources .* must map names to texts"),
        ('base = "4090"\nsources = { memory = 3 }', "sources .* must map names to texts"),
        ('base = "4090"\ncompute_capability = "8"', "compute_capability .* is '8'"),
        ('base = "4090"\ncompute_capability = "8.9.1"', "compute_capability .* is '8.9.1'"),
        ('base = "4090"\ncompute_capability = "gfx9"', "compute_capability .* is 'gfx9'"),
        ("", "lacks architecture, bandwidth_bytes_per_s"),
        ("base =", "cannot be read"),
        ("x = " + "[" * 5000, "cannot be read"),
        ("\0", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        cards.find(write(tmp_path, text))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="there is no card file"):
        cards.find(str(tmp_path / "gone.toml"))
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b'name = "\xff"')
    for name in ("folder.toml", "bytes.toml", "nul\0.toml"):
        with pytest.raises(UsageError, match="cannot be read"):
            cards.find(str(tmp_path / name))
    with pytest.raises(UsageError, match="cannot be read"):
        cards.find("~nobody-of-this-name/card.toml")


def test_a_file_has_one_name_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cards.full_name("virtual:mine.toml") == f"virtual:{tmp_path / 'mine.toml'}"
    for name in ("virtual:4090", "cuda:0", "mine.toml", "cpu"):
        assert cards.full_name(name) == name
