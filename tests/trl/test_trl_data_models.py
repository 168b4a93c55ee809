"""Models that cannot be trained, or not as they are: their facts, weights and chat templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_kit import Broken, Rows, copy_model, refused, with_config, with_text
from transformers import AutoTokenizer
from trl_kit import keys_for, prepare

from autotune.errors import PrerequisiteError, UsageError
from autotune.executors.subprocess import SubprocessExecutor
from autotune.trainers.loading import check_weights

pytestmark = pytest.mark.trl

ENCODER = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 384}
CUSTOM = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
PACKAGE = {"quant_method": "hqq", "quant_config": {}}


MODELS: dict[str, tuple[Broken, type[Exception], str]] = {
    "heads": (with_config(num_attention_heads=7, head_dim=None), UsageError, "multiple of"),
    "shared heads": (with_config(num_key_value_heads=4), UsageError, "num_key_value_heads=4"),
    "no heads": (with_config(num_key_value_heads=0), UsageError, "LlamaForCausalLM"),
    "few tokens": (with_config(vocab_size=200), UsageError, "vocab_size 200"),
    "no token": (with_config(vocab_size=0), UsageError, "LlamaForCausalLM"),
    "text for a number": (with_config(vocab_size="many"), UsageError, "vocab_size"),
    "unknown activation": (with_config(hidden_act="nosuch"), UsageError, "nosuch"),
    "unknown dtype": (with_config(dtype="nosuch"), UsageError, "nosuch"),
    "pad id": (with_config(pad_token_id=99_999), UsageError, "adding"),
    "unknown type": (with_config(model_type="nosuch"), UsageError, "nosuch"),
    "no type": (with_config(model_type=None), PrerequisiteError, "model_type"),
    "text for a list": (with_config(architectures="LlamaForCausalLM"), UsageError, "architecture"),
    "other architecture": (with_config(architectures=["Qwen2ForCausalLM"]), UsageError, "Qwen2"),
    "no head": (with_config(architectures=["LlamaModel"]), UsageError, "no head"),
    "other head": (
        with_config(architectures=["LlamaForSequenceClassification"]), UsageError, "no head"
    ),
    "encoder": (with_config(**ENCODER), UsageError, "encoder"),
    "encoder's own head": (
        with_config(**{**ENCODER, "architectures": ["BertLMHeadModel"]}), UsageError, "encoder"
    ),
    "encoder-decoder": (
        with_config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
        UsageError,
        "encoder with a decoder",
    ),
    "images": (
        with_config(model_type="vit", architectures=["ViTForImageClassification"]),
        UsageError,
        "ViT",
    ),
    "own code": (
        with_config(model_type="custom", auto_map=CUSTOM), PrerequisiteError, "own repository"
    ),
    "quantisation": (
        with_config(quantization_config={"quant_method": "nosuch"}), UsageError, "quantised"
    ),
    "a package for it": (
        with_config(quantization_config=PACKAGE), PrerequisiteError, "needs a package"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_trained_is_refused_with_a_hint(
    case: str, executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    make, kind, named = MODELS[case]
    refused(executor, work, make(model, tmp_path, chats), kind, named)


def test_an_unknown_architecture_is_what_trl_makes_of_it(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    make = with_config(architectures=["LLaMAForCausalLM"])
    found, dataset, _ = make(model, tmp_path, chats)
    facts = prepare(executor, work, keys_for(found, dataset))["model"]
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["declared_architecture"] == "LLaMAForCausalLM"


def test_more_tokens_than_the_model_knows_are_fine_where_no_row_holds_them(
    prepare_rows: Callable[..., dict[str, Any]], model: str, chats: Rows, tmp_path: Path
) -> None:
    num_known = len(AutoTokenizer.from_pretrained(model)) - 1
    found, _, _ = with_config(vocab_size=num_known)(model, tmp_path, chats)
    rows = [{"input_ids": [3, 4, 5, num_known - 1]}] * 3
    assert prepare_rows(rows, of=found)["data"]["num_rows"] == 3


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("model.safetensors", b"", UsageError),
        ("model.safetensors", b"\xff" * 100, UsageError),
        ("model.safetensors.index.json", b"{", UsageError),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            PrerequisiteError,
        ),
        ("notes.md", b"", PrerequisiteError),
    ],
)
def test_real_weights_must_be_there_and_whole(
    name: str,
    content: bytes,
    kind: type[Exception],
    model: str,
    tmp_path: Path,
) -> None:
    found = copy_model(model, tmp_path / "model")
    (found / name).write_bytes(content)
    check_weights(str(found), "random")
    with pytest.raises(kind) as caught:
        check_weights(str(found), "real")
    assert str(found) in caught.value.message
    assert caught.value.hint


def test_whole_weights_are_fine(model: str) -> None:
    check_weights(model, "real")


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('roles must alternate') }}"]
)
def test_a_template_that_refuses_is_an_error_of_ours(
    template: str,
    prepare_rows: Callable[..., dict[str, Any]],
    model: str,
    chats: Rows,
    tmp_path: Path,
) -> None:
    found, _, _ = with_text("chat_template.jinja", template)(model, tmp_path, chats)
    with pytest.raises(UsageError, match="TRL cannot prepare") as caught:
        prepare_rows(chats, of=found)
    assert "template" in caught.value.hint


@pytest.mark.parametrize("name", ["/no/such/folder", "/no/such/template.jinja"])
def test_a_missing_chat_template_is_an_error_of_ours(
    name: str, prepare_rows: Callable[..., dict[str, Any]], chats: Rows
) -> None:
    with pytest.raises(UsageError, match="/no/such") as caught:
        prepare_rows(chats, chat_template_path=name)
    assert "template" in caught.value.hint
