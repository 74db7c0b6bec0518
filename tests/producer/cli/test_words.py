from __future__ import annotations

import io

import pytest
import rich.console
import typer

from producer.cli.words import facts, late_bar, share


@pytest.mark.parametrize(("text", "value"), [("8%", 0.08), ("0.08", 0.08), ("0", 0), ("100%", 1)])
def test_a_share_is_a_percentage_or_a_fraction(text: str, value: float) -> None:
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["8", "-1%", "101%", "some", "nan"])
def test_what_is_no_share_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        share(text)


def test_counts_by_name_are_words_for_people_and_objects_for_programs() -> None:
    found = {"run": "r", "refused": {"no_messages": 2, "bad_tools": 1}, "rejected": {}}

    assert facts(found, as_json=True) == found
    assert facts(found, as_json=False) == {
        "run": "r",
        "refused": "no messages 2, bad tools 1",
        "rejected": "none",
    }


@pytest.mark.parametrize(("after_s", "shows"), [(0.0, True), (60.0, False)])
def test_a_bar_shows_up_only_for_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, after_s: float, shows: bool
) -> None:
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True)
    monkeypatch.setattr("dflash_workers.contract.terminal.err", console)
    monkeypatch.setattr("producer.cli.words.BAR_AFTER_S", after_s)

    with late_bar("batches") as hear:
        hear(1, 2)
        hear(2, 2)

    assert ("batches" in screen.getvalue()) is shows
