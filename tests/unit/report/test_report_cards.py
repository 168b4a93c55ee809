"""Searches on several cards set against each other: figures, order, sentences, text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from report_factory import GIB, make_failure, make_report, make_trial

from autotune.report import cards_text
from autotune.report.cards import CardComparison, CardFailure, CardResult

SMALL, MIDDLE, LARGE = "rtx-4090", "a100-80gb", "h100-sxm-80gb"
BROKEN = CardFailure(kind="BaselineError", message="the baseline crashed.", hint="Look there.")
LORA = {"adaptation": "lora"}


def a_card(
    name: str, size_gib: int, rate: float | None = None, peak_gib: float = 10.0, **values: Any
) -> CardResult:
    """Return a card whose baseline trains all weights at a rate; None if that ran out."""
    report = values.pop("report", None)
    trials = values.pop("trials", None)
    if report is None and trials is None:
        trials = [make_failure(0) if rate is None else predicted(0, rate, peak_gib)]
    if trials is not None:
        device = {"name": f"virtual:{name}", "kind": "cuda", "label": name}
        report = make_report(trials, device=device, num_candidates=len(trials))
    return CardResult(
        name=name,
        device=f"virtual:{name}",
        label=f"Card {name}",
        memory_bytes=size_gib * GIB,
        report=report,
        **values,
    )


def predicted(number: int, rate: float, peak_gib: float = 10.0, **values: Any) -> Any:
    return make_trial(
        number,
        rate,
        peak_gib,
        spread=0.0,
        source="predicted",
        measurement_values={"source": "predicted"},
        **values,
    )


def compared(*cards: CardResult, **values: Any) -> CardComparison:
    return CardComparison(
        model="org/model", dataset="org/data", trainer="sft", cards=cards, **values
    )


def three(**prices: float) -> CardComparison:
    return compared(
        a_card(LARGE, 80, 4000.0),
        a_card(SMALL, 24, 1000.0),
        a_card(MIDDLE, 80, 2000.0),
    ).with_prices({name.replace("_", "-"): price for name, price in prices.items()})


def said(comparison: CardComparison, width: int = 100) -> str:
    return " ".join(cards_text.render(comparison, width).plain.split())


# --- figures and order ---------------------------------------------------------------------------


def test_without_prices_the_smallest_is_first_and_of_equals_the_fastest() -> None:
    found = three()
    assert [card.name for card in found.cards] == [SMALL, LARGE, MIDDLE]
    assert found.cheapest is None
    assert found.lowest_priced is None
    assert found.smallest is found.cards[0]
    assert found.fastest is found.cards[1]


def test_with_prices_the_order_is_by_cost_per_epoch() -> None:
    # Of 1,000 tokens/s at 1, 2,000 at 1.5 and 4,000 at 4, the second costs least.
    found = three(**{"rtx_4090": 1.0, "a100_80gb": 1.5, "h100_sxm_80gb": 4.0})
    assert [card.name for card in found.cards] == [MIDDLE, SMALL, LARGE]
    assert found.cheapest is not None
    assert found.lowest_priced is not None
    assert (found.cheapest.name, found.lowest_priced.name) == (MIDDLE, SMALL)


def test_costs_are_price_times_time() -> None:
    pick = three(rtx_4090=3.6).cards[0].fastest
    assert pick is not None
    # 16,000 rows, 8 a step of 1,000 tokens: 2,000 s an epoch, and 1,000 s a million tokens.
    assert pick.epoch_s == pytest.approx(2000.0)
    assert pick.cost_per_epoch == pytest.approx(2.0)
    assert pick.cost_per_million_tokens == pytest.approx(1.0)
    assert pick.headroom_ratio == pytest.approx(1 - 10 / 24)
    assert pick.tokens_per_s is not None
    assert (pick.tokens_per_s.low, pick.tokens_per_s.high) == (750.0, 1250.0)


def test_a_card_without_a_price_takes_no_part_in_what_is_cheapest() -> None:
    found = three(h100_sxm_80gb=100.0)
    assert found.cheapest is found.cards[0]
    assert found.cheapest.name == LARGE
    text = said(found)
    assert f"The only card with a price on which it fits: {LARGE}" in text
    assert f"Smallest card on which it fits: {SMALL}" in text
    assert "Cheapest" not in text
    assert f"Cheapest of the 2 cards with a price on which it fits: {SMALL}" in said(
        three(h100_sxm_80gb=100.0, rtx_4090=1.0)
    )
    (note,) = (note for note in found.notes if "have no price" in note)
    assert f"--price {SMALL}=PER_HOUR --price {MIDDLE}=PER_HOUR" in note


def test_full_fine_tuning_is_the_fastest_that_trains_all_weights() -> None:
    adapters = predicted(1, 3000.0, 5.0, config={"use_peft": True}, changed=LORA)
    card = a_card(SMALL, 24, trials=[predicted(0, 1000.0), predicted(2, 1500.0, 12.0), adapters])
    assert card.fastest is not None
    assert card.fastest.trial.number == 1
    assert card.full is not None
    assert card.full.trial.number == 2
    assert card.full_fits


def test_full_fine_tuning_that_was_not_tried_is_not_said_to_fail() -> None:
    adapters = predicted(1, 3000.0, config={"use_peft": True}, changed=LORA)
    assert a_card(SMALL, 24, trials=[adapters]).full_fits is None
    assert a_card(SMALL, 24, trials=[make_failure(0), adapters]).full_fits is False


def test_fits_tells_no_from_not_known() -> None:
    assert a_card(SMALL, 24, 1000.0).fits is True
    assert a_card(SMALL, 24).fits is False
    assert a_card(SMALL, 24, trials=(), report=None).fits is False  # finished, nothing drawn
    waiting = CardResult(name=SMALL, device="d", label="l", memory_bytes=GIB)
    assert waiting.fits is None
    broken = CardResult(name=SMALL, device="d", label="l", memory_bytes=GIB, failure=BROKEN)
    assert (broken.fits, broken.is_broken) == (None, True)
    # What was found before it broke has been found.
    found = a_card(SMALL, 24, 1000.0, failure=BROKEN)
    assert (found.fits, found.is_broken) == (True, False)


def test_plain_data_is_json() -> None:
    found = three(rtx_4090=1.0)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["schema"] == 1
    assert data["source"] == "predicted"
    assert (data["cheapest"], data["smallest"], data["fastest"]) == (SMALL, SMALL, LARGE)
    assert [card["name"] for card in data["cards"]] == [SMALL, LARGE, MIDDLE]
    assert data["cards"][0]["picks"]["fastest"]["tokens_per_s"]["median"] == pytest.approx(1000.0)
    assert data["cards"][0]["picks"]["full"]["trial"] == 0
    nothing = compared(a_card(SMALL, 24)).to_dict()
    assert nothing["cards"][0]["picks"] == {"fastest": None, "balanced": None, "full": None}


# --- sentences -----------------------------------------------------------------------------------


def test_the_smallest_card_is_named_and_how_to_give_prices() -> None:
    text = said(three())
    assert "Smallest card on which it fits: rtx-4090 (Card rtx-4090, 24.00 GiB)" in text
    assert "Cheapest" not in text
    assert f"--price {SMALL}=PER_HOUR --price {LARGE}=PER_HOUR" in text
    assert f"Fastest: {LARGE} (Card {LARGE}, 80.00 GiB)" in text
    assert "4.00 times the rate of rtx-4090" in text


def test_the_cheapest_per_epoch_and_per_hour_are_named_apart() -> None:
    text = said(three(rtx_4090=1.0, a100_80gb=1.5, h100_sxm_80gb=4.0))
    assert "Cheapest card on which it fits: a100-80gb" in text
    assert "Lowest price per hour of those on which it fits: rtx-4090, 1." in text
    assert "Smallest" not in text


def test_orders_within_the_error_of_predictions_are_called_so() -> None:
    near = compared(a_card(SMALL, 24, 1000.0), a_card(LARGE, 80, 1200.0))
    assert any("rtx-4090 and the faster h100-sxm-80gb lie within" in note for note in near.notes)
    assert not any("lie within" in note for note in three().notes)
    costs = near.with_prices({SMALL: 1.0, LARGE: 1.3})
    assert any("the cheaper rtx-4090 lie within" in note for note in costs.notes)


def test_fastest_configurations_that_train_otherwise_are_told() -> None:
    adapters = predicted(
        1, 900.0, config={"use_peft": True}, changed=LORA, candidate=LORA, changes=("method",)
    )
    found = compared(
        a_card(SMALL, 24, trials=[make_failure(0), adapters]),
        a_card(LARGE, 80, trials=[predicted(0, 1000.0, candidate={"adaptation": "full"})]),
    )
    (note,) = (note for note in found.notes if "do not train the same" in note)
    assert f"lora on {SMALL}; full on {LARGE}" in note
    assert f"Smallest card on which full fine-tuning fits: {LARGE}" in said(found)
    assert not any("do not train the same" in note for note in three().notes)


def test_values_that_one_card_lacks_are_told_with_the_reason() -> None:
    reason = "the card does not support bfloat16"
    report = make_report(
        [predicted(0, 1000.0)],
        device={"name": "virtual:t4", "kind": "cuda", "label": "T4"},
        removed_values=(
            ("dtype=bfloat16", "T4 does not support bfloat16"),
            ("optim=x", "no package has it"),
        ),
        inactive_knobs=(("dtype", "float16 is the only value left here"),),
    )
    other = make_report(
        [predicted(0, 1000.0)],
        device={"name": "virtual:t4", "kind": "cuda", "label": "T4"},
        removed_values=(("optim=x", "no package has it"),),
    )
    found = compared(a_card("t4", 15, report=report), a_card(SMALL, 24, report=other))
    (note,) = (note for note in found.notes if "searched without" in note)
    assert note == f"t4 was searched without dtype=bfloat16, which other cards have: {reason}."
    both = compared(
        *(a_card(name, 15, report=report) for name in ("t4", "v100")),
        a_card(SMALL, 24, report=other),
    )
    assert any(
        note.startswith("t4 and v100 were searched without dtype=bfloat16") for note in both.notes
    )


def test_other_versions_are_told() -> None:
    device = {"name": "virtual:x", "kind": "cuda", "label": "x"}
    older = make_report([predicted(0, 1.0)], device=device, versions={"torch": "2.12.0"})
    newer = make_report([predicted(0, 1.0)], device=device, versions={"torch": "2.13.0"})
    found = compared(a_card(SMALL, 24, report=older), a_card(LARGE, 80, report=newer))
    assert any("different versions of torch" in note for note in found.notes)


def test_where_it_fits_on_none_that_is_said() -> None:
    assert "It fits on none of these cards." in said(compared(a_card(SMALL, 24)))
    broken = CardResult(name=LARGE, device="d", label="l", memory_bytes=GIB, failure=BROKEN)
    text = said(compared(a_card(SMALL, 24), broken))
    assert "It is not known to fit on any of these cards" in text
    assert "h100-sxm-80gb: its search broke: the baseline crashed. Look there." in text


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("has_prices", [False, True])
def test_lines_keep_to_the_width_and_say_that_all_is_predicted(
    width: int, has_prices: bool
) -> None:
    prices = {"rtx_4090": 1.0, "a100_80gb": 1.5, "h100_sxm_80gb": 4.0}
    found = three(**prices) if has_prices else three()
    lines = cards_text.render(found, width).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("Predicted, not measured: org/model (sft)")
    assert "All figures are predicted, none is measured." in said(found, width)
    (head,) = (line for line in lines if line.startswith("card "))
    assert {"fits", "tokens/s", "epoch"} <= set(head.split())
    assert ("per epoch" in head) == has_prices
    rows = {
        line.split()[0]: line.split() for line in lines if line.startswith(("rtx", "a1", "h1"))
    }
    assert set(rows) == {SMALL, MIDDLE, LARGE}
    assert "4,000" in rows[LARGE]


def test_the_configurations_are_below_the_figures() -> None:
    quick = predicted(1, 3000.0, 20.0, changed={"optim": "adafactor"})
    card = a_card(SMALL, 24, trials=[predicted(0, 2900.0, 2.0), quick])
    text = said(compared(card))
    assert "[fastest] trial 1: 3,000 tokens/s, epoch 11 min 07 s, peak 20.00 GiB;" in text
    assert "optim=adafactor" in text
    assert "[balanced] trial 0: 2,900 tokens/s" in text
