from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import PrerequisiteError, UsageError
from autotune.probe import sources


def model_keys(name: str, **options: Any) -> dict[str, Any]:
    return sources.model_keys(name, **{"revision": None, "trust_remote_code": False, **options})


def dataset_keys(name: str, **options: Any) -> dict[str, Any]:
    return sources.dataset_keys(name, **{"split": None, "config_name": None, **options})


def test_a_hub_model_is_named_as_it_is() -> None:
    assert model_keys("Qwen/Qwen3-0.6B") == {"model_name_or_path": "Qwen/Qwen3-0.6B"}
    assert model_keys("gpt2") == {"model_name_or_path": "gpt2"}
    assert model_keys("a/b", revision="main", trust_remote_code=True) == {
        "model_name_or_path": "a/b",
        "model_revision": "main",
        "trust_remote_code": True,
    }


def test_a_local_model_is_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "./tiny", "tiny/", str(tmp_path / "tiny")):
        assert model_keys(name) == {"model_name_or_path": str(tmp_path / "tiny")}


@pytest.mark.parametrize("name", ["./gone", "/gone", "~/gone", "../gone", "a/b/c", ".", "file"])
def test_a_path_without_a_model_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrerequisiteError) as caught:
        model_keys(name)
    assert repr(name) in caught.value.message
    assert caught.value.hint


def test_a_hub_data_set_is_named_as_it_is() -> None:
    assert dataset_keys("trl-lib/Capybara") == {
        "dataset_name": "trl-lib/Capybara",
        "dataset_train_split": "train",
    }
    assert dataset_keys("a/b", split="test", config_name="main") == {
        "dataset_name": "a/b",
        "dataset_train_split": "test",
        "dataset_config": "main",
    }


@pytest.mark.parametrize(
    ("name", "builder"),
    [
        ("rows.json", "json"),
        ("rows.jsonl", "json"),
        ("rows.PARQUET", "parquet"),
        ("rows.csv", "csv"),
        ("rows.arrow", "arrow"),
    ],
)
def test_a_file_becomes_a_mixture(name: str, builder: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    assert dataset_keys(str(path), split="train[:10]") == {
        "datasets": [{"path": builder, "data_files": str(path), "split": "train[:10]"}],
        "dataset_train_split": "train",
    }


def test_a_relative_file_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    (entry,) = dataset_keys("rows.jsonl")["datasets"]
    assert entry["data_files"] == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["notes.txt", "rows", "rows.jsonl.gz"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError) as caught:
        dataset_keys(str(tmp_path / name))
    assert ".jsonl" in caught.value.hint


@pytest.mark.parametrize(
    "name",
    [
        "gone.jsonl",
        "./gone",
        "/gone/rows.csv",
        "~/gone",
        "gone.txt",
        "gone.tsv",
        "rows.jsonl.gz",
        "gone/",
        "a/b/c",
        "org/gone.parquet",
    ],
)
def test_a_path_without_data_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PrerequisiteError) as caught:
        dataset_keys(name)
    assert name in caught.value.message


def test_a_folder_of_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.jsonl").touch()
    assert dataset_keys(str(tmp_path), config_name="x") == {
        "dataset_name": str(tmp_path),
        "dataset_train_split": "train",
        "dataset_config": "x",
    }


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="no data file"):
        dataset_keys(str(tmp_path))


def save(folder: Path, *names: str) -> Path:
    """Write what ``Dataset.save_to_disk`` leaves, without the rows."""
    folder.mkdir(parents=True)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_model_is_not_taken_for_data(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="looks like a model, not like data") as caught:
        dataset_keys(str(tmp_path))
    assert "The model comes first" in caught.value.hint
    # A note on a data set may be called so, and data may lie beside a model.
    (tmp_path / "config.json").write_text('{"builder": "x"}')
    assert dataset_keys(str(tmp_path))["dataset_name"] == str(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "rows.jsonl").touch()
    assert dataset_keys(str(tmp_path))["dataset_name"] == str(tmp_path)


@pytest.mark.parametrize("name", ["trl-lib/Capybara", "imdb", "org/data-v1.0", "org/rows.v2"])
def test_a_hub_id_is_left_to_the_hub(name: str) -> None:
    assert dataset_keys(name)["dataset_name"] == name


def test_a_saved_data_set_is_its_arrow_files(tmp_path: Path) -> None:
    one = save(tmp_path / "one", "data-00000-of-00001.arrow")
    (entry,) = dataset_keys(str(one))["datasets"]
    assert entry["path"] == "arrow"
    assert entry["data_files"] == str(one / "data-00000-of-00001.arrow")
    two = save(tmp_path / "two", "a.arrow", "b.arrow")
    (entry,) = dataset_keys(str(two))["datasets"]
    assert entry["data_files"] == [str(two / "a.arrow"), str(two / "b.arrow")]


def test_a_saved_dictionary_offers_its_splits(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save(tmp_path / "test", "data.arrow")
    keys = dataset_keys(str(tmp_path), split="test")
    assert keys["datasets"][0]["data_files"] == str(tmp_path / "test/data.arrow")
    # What is loaded from files is always called train.
    assert keys["datasets"][0]["split"] == "train"
    assert keys["dataset_train_split"] == "train"
    with pytest.raises(UsageError, match="'dev'") as caught:
        dataset_keys(str(tmp_path), split="dev")
    assert "train, test" in caught.value.hint


@pytest.mark.parametrize(
    ("state", "dictionary"),
    [("{", None), ("{}", None), ("[]", None), (None, "{"), (None, "[]")],
)
def test_a_damaged_saved_data_set_is_an_error_of_ours(
    state: str | None, dictionary: str | None, tmp_path: Path
) -> None:
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    if dictionary is not None:
        (tmp_path / "dataset_dict.json").write_text(dictionary)
    with pytest.raises(UsageError) as caught:
        dataset_keys(str(tmp_path))
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("gpt2", "gpt2"),
        ("/models/tiny.v1/", "tiny.v1"),
        ("/", "model"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert sources.short_name(name) == short


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_an_empty_name_is_not_the_current_folder(name: str) -> None:
    for read in (model_keys, dataset_keys):
        with pytest.raises(UsageError, match="empty") as caught:
            read(name)
        assert caught.value.hint


@pytest.mark.parametrize("name", ["./" + "x" * 5000, "~no-such-user-here/x"])
def test_a_name_that_cannot_be_looked_up_is_an_error_of_ours(name: str) -> None:
    for read in (model_keys, dataset_keys):
        with pytest.raises(UsageError, match="cannot be looked up"):
            read(name)


def test_a_revision_of_a_local_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="revision has no effect"):
        model_keys(str(tmp_path), revision="main")


def test_a_configuration_of_local_rows_is_refused(tmp_path: Path) -> None:
    file, saved = tmp_path / "rows.json", tmp_path / "saved"
    file.touch()
    saved.mkdir()
    (saved / "state.json").write_text('{"_data_files": []}')
    for path in (file, saved):
        with pytest.raises(UsageError, match="dataset_config has no effect"):
            dataset_keys(str(path), config_name="main")


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl"])
def test_a_file_s_name_is_not_a_pattern(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    entry = dataset_keys(str(path))["datasets"][0]
    assert glob.glob(entry["data_files"]) == [str(path)]


@pytest.mark.parametrize("name", ["a[1]/x.jsonl", "a/x[1].jsonl", "a*/x.jsonl", "a/b?/x.jsonl"])
def test_a_folder_that_reads_as_a_pattern_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(UsageError, match="pattern"):
        dataset_keys(str(tmp_path / name.partition("/")[0]))


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("a.parquet", "b.csv"), ("1 csv", "1 parquet")),
        (("a.jsonl", "b.json", "deep/c.arrow"), ("1 arrow", "2 json")),
        (("a.jsonl", "b.txt"), ("1 json", "1 text")),
    ],
)
def test_a_folder_of_several_kinds_names_them(
    names: tuple[str, ...], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="several kinds") as caught:
        dataset_keys(str(tmp_path))
    assert all(kind in caught.value.message for kind in kinds)


def test_notes_and_hidden_files_are_no_second_kind(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    for name in ("a.parquet", "LICENSE.txt", "dataset_infos.json", ".cache/b.csv", "README.md"):
        (tmp_path / name).touch()
    assert dataset_keys(str(tmp_path))["dataset_name"] == str(tmp_path)


def test_a_card_may_choose_among_kinds(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nconfigs:\n- data_files: a.parquet\n---\n")
    for name in ("a.parquet", "raw.csv"):
        (tmp_path / name).touch()
    assert dataset_keys(str(tmp_path))["dataset_name"] == str(tmp_path)
