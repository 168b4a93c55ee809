"""Reading spaces from YAML: what is accepted, and that errors name file, line and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from autotune.errors import SpaceError, UnknownNameError, UsageError
from autotune.space import loader
from autotune.space.domains import Choice, IntRange, PowerOfTwo, Quantiles
from autotune.space.knob import Knob
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context

HEAD = "schema: 1\ntrainer: sft\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


def test_every_form_is_read(tmp_path: Path) -> None:
    text = HEAD + (
        "description: mine\n"
        "knobs:\n"
        "  batching: [padded, bfd]\n"
        "  max_length: {quantiles: [0.5, 1.0]}\n"
        "  per_device_train_batch_size: {powers_of_two: [1, 64]}\n"
        "  adaptation: lora\n"
        "  lora_r: {range: [8, 64, 8]}\n"
        "  dtype: {choice: [bfloat16]}\n"
        "  activation_offloading: [off, on]\n"
        "  pad_to_multiple_of: [none, 8]\n"
        "  torch_empty_cache_steps: [null, 4]\n"
        "  torch_compile: [false]\n"
        "  optim: auto\n"
        "fixed:\n"
        "  learning_rate: 1e-4\n"
        "  warmup_ratio: 0.1\n"
        "  dataset_kwargs: {add_special_tokens: false}\n"
        "  run_name: '1e-4'\n"
    )
    space = SearchSpace.load(write(tmp_path, text))
    domains = {knob.name: knob.domain for knob in space.knobs}
    assert list(domains) == [
        "batching", "max_length", "per_device_train_batch_size", "adaptation", "lora_r", "dtype",
        "activation_offloading", "pad_to_multiple_of", "torch_empty_cache_steps", "torch_compile",
        "optim",
    ]  # fmt: skip
    assert domains["batching"] == Choice(("padded", "bfd"))
    assert domains["max_length"] == Quantiles((0.5, 1.0))
    assert domains["per_device_train_batch_size"] == PowerOfTwo(1, 64)
    assert domains["adaptation"] == Choice(("lora",))
    assert domains["lora_r"] == IntRange(8, 64, 8)
    assert domains["dtype"] == Choice(("bfloat16",))
    assert domains["activation_offloading"] == Choice(("off", "on"))
    assert domains["pad_to_multiple_of"] == Choice(("none", 8))
    assert domains["torch_empty_cache_steps"] == Choice(("none", 4))
    assert domains["torch_compile"] == Choice(("off",))
    assert space.fixed == {
        "learning_rate": 1e-4,
        "warmup_ratio": 0.1,
        "dataset_kwargs": {"add_special_tokens": False},
        "run_name": "1e-4",
    }
    assert (space.name, space.trainer, space.description) == ("my", "sft", "mine")


def test_auto_reads_the_data(tmp_path: Path) -> None:
    space = SearchSpace.load(write(tmp_path, HEAD + "knobs:\n  max_length: auto\n"))
    assert space.knobs[0].domain is None
    assert space.knobs[0].values(make_context()) == (512, 1024, 1536, 2048, 3072)


def test_explicit_lengths_are_sorted(tmp_path: Path) -> None:
    space = SearchSpace.load(write(tmp_path, HEAD + "knobs:\n  max_length: [2048, 512]\n"))
    assert space.knobs[0].domain == Choice((512, 2048), ordered=True)


@pytest.mark.parametrize(
    ("text", "kind", "line", "message"),
    [
        # names
        (HEAD + "knobs:\n  batchng: [padded]\n", UnknownNameError, 4, "'batching'"),
        (HEAD + "knob:\n  batching: [padded]\n", UnknownNameError, 3, "'knobs'"),
        ("schema: 1\ntrainer: sftt\nknobs: {}\n", UnknownNameError, 2, "'sft'"),
        (HEAD + "knobs:\n  batching:\n  - padded\n  - bdf\n", SpaceError, 6, "'bfd'"),
        (HEAD + "knobs:\n  batching: {quantile: [1]}\n", SpaceError, 4, "'quantiles'"),
        # structure
        ("", SpaceError, None, "empty"),
        ("- 1\n", SpaceError, 1, "must be a mapping"),
        (HEAD + "knobs:\n", SpaceError, 3, "must be a mapping"),
        (HEAD + "knobs: {}\n", SpaceError, 3, "at least one knob"),
        (HEAD, SpaceError, 1, "'knobs' is missing"),
        ("trainer: sft\nknobs: {dtype: auto}\n", SpaceError, 1, "'schema' is missing"),
        ("schema: 2\nknobs: {dtype: auto}\n", SpaceError, 1, "schema 2 is unknown"),
        ("schema: true\nknobs: {dtype: auto}\n", SpaceError, 1, "schema True is unknown"),
        ("schema: 1\ntrainer: [sft]\nknobs: {}\n", SpaceError, 2, "trainer must be text"),
        (HEAD + "description: 3\nknobs: {dtype: auto}\n", SpaceError, 3, "must be text"),
        (HEAD + "knobs:\n  dtype: auto\n  dtype: auto\n", SpaceError, 5, "first in line 4"),
        (HEAD + "knobs: {dtype: auto}\nknobs: {dtype: auto}\n", SpaceError, 4, "given twice"),
        (HEAD + "knobs:\n  ? [a]\n  : 1\n", SpaceError, 4, "a name must be text"),
        (HEAD + "knobs:\n  dtype: [float32\n", SpaceError, 5, "not valid YAML"),
        (HEAD + "---\nknobs: {}\n", SpaceError, 3, "not valid YAML"),
        (HEAD + "knobs: &a\n  dtype: *b\n", SpaceError, 4, "not valid YAML"),
        (HEAD + "fixed: {x: &a [*a]}\nknobs: {dtype: auto}\n", SpaceError, 3, "refer to itself"),
        # values
        (HEAD + "knobs:\n  batching: []\n", SpaceError, 4, "at least one value"),
        (HEAD + "knobs:\n  batching: [bfd, bfd]\n", SpaceError, 4, "listed twice"),
        (HEAD + "knobs:\n  batching: [[bfd]]\n", SpaceError, 4, "single value"),
        (HEAD + "knobs:\n  batching: [1]\n", SpaceError, 4, "not one of padded"),
        (HEAD + "knobs:\n  lora_r: [8, x]\n", SpaceError, 4, "whole number"),
        (HEAD + "knobs:\n  lora_r: [0]\n", SpaceError, 4, "1 to 4096"),
        (HEAD + "knobs:\n  lora_r: [8.5]\n", SpaceError, 4, "whole number"),
        (HEAD + "knobs:\n  lora_r: {range: [64, 8]}\n", SpaceError, 4, "is empty"),
        (HEAD + "knobs:\n  lora_r: {range: [1, 8000]}\n", SpaceError, 4, "cannot be 4097"),
        (HEAD + "knobs:\n  lora_r: {quantiles: [0.5]}\n", SpaceError, 4, "no quantiles"),
        (HEAD + "knobs:\n  lora_r: {powers_of_two: [1, 6]}\n", SpaceError, 4, "power of two"),
        (HEAD + "knobs:\n  max_length: {quantiles: [95]}\n", SpaceError, 4, "at most 1"),
        (HEAD + "knobs:\n  batching: {powers_of_two: [1, 4]}\n", SpaceError, 4, "cannot be 1"),
        (HEAD + "knobs:\n  lora_r: {}\n", SpaceError, 4, "describes no values"),
        (HEAD + "knobs:\n  lora_r: {range: [8, 8], range: [8, 8]}\n", SpaceError, 4, "twice"),
        (HEAD + "knobs:\n  dtype: [2020-01-01]\n", SpaceError, 4, "not a plain value"),
        (HEAD + "knobs:\n  dtype: [!!python/name:os.system x]\n", SpaceError, 4, "cannot be read"),
        # fixed
        (
            HEAD + "knobs: {dtype: auto}\nfixed:\n  a: 1\n  gradient_checkpointing: true\n",
            SpaceError,
            6,
            "belongs to the knob 'checkpointing'",
        ),
        (
            HEAD + "knobs: {dtype: auto}\nfixed:\n  max_length: 512\n",
            SpaceError,
            5,
            "belongs to the knob 'max_length'",
        ),
        (
            HEAD + "knobs: {dtype: auto}\nfixed:\n  activation_checkpointing: false\n",
            SpaceError,
            5,
            "'checkpointing'",
        ),
        (
            HEAD + "knobs: {dtype: auto}\nfixed:\n  model_init_kwargs: {use_kernels: true}\n",
            SpaceError,
            5,
            "model_init_kwargs.use_kernels belongs to the knob 'use_kernels'",
        ),
        (HEAD + "knobs: {dtype: auto}\nfixed:\n  env: x\n", SpaceError, 5, "'allocator'"),
        (HEAD + "knobs: {dtype: auto}\nfixed:\n  max_steps: 9\n", SpaceError, 5, "probe itself"),
        (HEAD + "knobs: {dtype: auto}\nfixed: [1]\n", SpaceError, 4, "must be a mapping"),
        (HEAD + "knobs: {dtype: auto}\nfixed: {a: 1, a: 2}\n", SpaceError, 4, "given twice"),
        (HEAD + "knobs: {dtype: auto}\nfixed: {a: {b: 1, b: 2}}\n", SpaceError, 4, "given twice"),
        (HEAD + "knobs: {dtype: auto}\nfixed: {a: 2020-01-01}\n", SpaceError, 4, "in quotes"),
    ],
)
def test_errors_name_file_line_and_remedy(
    tmp_path: Path, text: str, kind: type[UsageError], line: int | None, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(kind) as caught:
        SearchSpace.load(path)
    place = f"{path}, line {line}: " if line else f"{path}: "
    assert caught.value.message.startswith(place)
    assert caught.value.message.count(str(path)) == 1
    assert message in str(caught.value)


def test_a_knob_for_another_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Knob(
        name="beta",
        domain=Choice((0.1, 0.2)),
        baseline=0.1,
        changes="method",
        help="x",
        needed_keys=("beta",),
    )
    loader.registry.names()
    monkeypatch.setitem(loader.registry._entries, "beta", other)
    path = write(tmp_path, HEAD + "knobs:\n  dtype: auto\n  beta: [0.1]\n")
    with pytest.raises(SpaceError, match=r"my.yaml, line 5: .*for the trainer 'sft'.*no 'beta'"):
        SearchSpace.load(path)
    with pytest.raises(SpaceError, match="not for the trainer 'sft'"):
        SearchSpace((other,))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match="does not exist"):
        SearchSpace.load(tmp_path / "none.yaml")
    with pytest.raises(SpaceError, match="cannot be read"):
        SearchSpace.load(tmp_path)
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SpaceError, match="cannot be read"):
        SearchSpace.load(tmp_path / "bad.yaml")
    (tmp_path / "bell.yaml").write_text("a: \x07")
    with pytest.raises(SpaceError, match="not valid YAML"):
        SearchSpace.load(tmp_path / "bell.yaml")


def test_unknown_space() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown search space 'quik'.*'quick'"):
        SearchSpace.load("quik")


def test_spaces_come_with_the_package() -> None:
    assert {"sft", "quick"} <= set(SearchSpace.available())
    for name in SearchSpace.available():
        space = SearchSpace.load(name)
        assert space.name == name
        assert space.description


def test_the_full_space_offers_every_knob_of_its_trainer() -> None:
    space = SearchSpace.load("sft")
    known = {name for name, knob in loader.registry if knob.is_for("sft")}
    assert {knob.name for knob in space.knobs} == known
    held = {knob.name for knob in space.knobs if knob.domain and len(knob.domain.values) == 1}
    assert held == {"torch_empty_cache_steps", "use_kernels", "torch_compile"}


def test_the_quick_space_is_small() -> None:
    size = SearchSpace.load("quick").resolve(make_context()).size()
    assert 50 <= size <= 320


def test_the_digest_tells_what_is_drawn(tmp_path: Path) -> None:
    base = HEAD + "knobs:\n  batching: [padded, bfd]\n  dtype: auto\n"
    digest = SearchSpace.load(write(tmp_path, base)).digest
    assert len(digest) == 64
    assert SearchSpace.load(write(tmp_path, "# note\ndescription: x\n" + base)).digest == digest
    for other in (
        base.replace("padded, bfd", "padded"),
        base + "fixed: {learning_rate: 0.1}\n",
        HEAD + "knobs:\n  dtype: auto\n  batching: [padded, bfd]\n",
    ):
        assert SearchSpace.load(write(tmp_path, other)).digest != digest


def test_spaces_in_code_are_checked_too() -> None:
    mine = Knob(name="mine", domain=Choice((1,)), baseline=1, changes="nothing", help="x")
    assert SearchSpace((mine,)).knobs == (mine,)
    with pytest.raises(SpaceError, match="listed twice"):
        SearchSpace((mine, mine))
    with pytest.raises(SpaceError, match="belongs to the knob 'mine'"):
        SearchSpace((mine,), fixed={"mine": 2})
    with pytest.raises(SpaceError, match="belongs to the knob 'dtype'"):
        SearchSpace((mine,), fixed={"dtype": "float16"})


def test_the_packaged_files_are_plain_yaml() -> None:
    for path in (Path(__file__).parents[3] / "search_spaces").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["schema"] == loader.SCHEMA


def _laughs() -> str:
    lines = ["fixed:", "  a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        (_laughs(), 9, "aliases"),
        (f"fixed:\n  a: &a '{'x' * 100_000}'\n  b: [{', '.join(['*a'] * 1000)}]", 6, "aliases"),
        (f"fixed: {{a: [{'x, ' * 60_000}]}}", 4, "more than 50,000 values"),
        ("fixed:\n  a: " + "[" * 5000 + "]" * 5000, 5, "deep"),
        ("fixed:\n  a: " + "{a: " * 3000 + "1" + "}" * 3000, 5, "deep"),
        ("fixed:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 2000)), 36, "deep"),
        ("fixed:\n  a:\n  " + "- " * 2000 + "x", 6, "deep"),
    ],
    ids=["laughs", "long text", "long list", "brackets", "braces", "indents", "dashes"],
)
def test_a_text_beyond_all_bounds_is_refused_at_once(text: str, line: int, named: str) -> None:
    with pytest.raises(SpaceError, match=named) as caught:
        loader.parse(HEAD + "knobs: {lora_r: [8]}\n" + text, "my.yaml")
    assert caught.value.message.startswith(f"my.yaml, line {line}: ")
    assert caught.value.hint


def test_a_few_aliases_are_fine() -> None:
    text = HEAD + "knobs:\n  lora_r: &two [8, 16]\nfixed:\n  a: &a [1, 2]\n  b: [*a, *a]\n"
    assert loader.parse(text).fixed["b"] == [[1, 2], [1, 2]]


def test_the_largest_list_that_a_knob_takes_is_within_bounds() -> None:
    values = ", ".join(map(str, range(1, 10_001)))
    text = HEAD + f"knobs:\n  max_length: [{values}]\n"
    assert len(loader.parse(text).knobs[0].accepted.describe()) > 0
