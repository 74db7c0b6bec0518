"""Counts over samples, against counting the obvious way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.trainer.gate.making import (
    SPEC,
    STOP,
    healthy,
    random_answer,
    read_shard_of,
    sample_of,
    words,
)
from trainer.gate.judge import facts_of
from trainer.gate.tally import MAX_SOURCES, OTHER_SOURCES, UNKNOWN_SOURCE, Tally


def test_facts_are_what_counting_each_sample_gives() -> None:
    thinking = [sample_of(n, random_answer(n, 50), thinking=20) for n in range(60, 70)]
    cut = [sample_of(n, random_answer(n, 40)[:-1], flags=["truncated"]) for n in range(70, 80)]
    samples = [*healthy(60), *thinking, *cut]
    samples[3:5] = [replace(s, turn=2, heldout=True) for s in samples[3:5]]
    said = [words(f"Word {n}.", source=f"file{n % 3}.jsonl") for n in range(len(samples))]
    said[7] = words("I'm sorry, but I can't help with that.", num_tools=2)
    said[8] = words("Погода сегодня хорошая.", num_tools=2, num_calls=1)
    tally = Tally(SPEC)

    tally.add(read_shard_of(samples[:50], said[:50], skipped={"garbled": 2}))
    tally.add(read_shard_of(samples[50:], said[50:], skipped={"garbled": 1}))

    facts = facts_of(tally)
    num_tokens = sum(len(s.ids) for s in samples)
    num_loss = sum(int(s.loss_mask().sum()) for s in samples)
    assert (facts["num_samples"], facts["num_heldout"], facts["num_shards"]) == (80, 2, 2)
    assert (facts["num_tokens"], facts["num_loss_tokens"]) == (num_tokens, num_loss)
    assert facts["loss_share"] == pytest.approx(num_loss / num_tokens, abs=1e-6)
    assert facts["thinking_share"] == pytest.approx(200 / num_loss, abs=1e-6)
    assert facts["finish_reasons"] == {"stop": 70, "length": 10}
    assert (facts["flags"], facts["turns"]) == ({"truncated": 10}, {"0": 78, "2": 2})
    assert (facts["num_with_tools"], facts["num_with_calls"]) == (2, 1)
    assert (facts["num_refusals"], facts["skipped"]) == (1, {"garbled": 3})
    assert facts["main_scripts"] == {"Latin": 79, "Cyrillic": 1}
    assert facts["output_tokens"]["max"] == max(int(s.loss_mask().sum()) for s in samples)
    sources = Counter(w.source for w in said)
    assert {n: s["num_samples"] for n, s in facts["sources"].items()} == sources
    assert sum(s["num_loss_tokens"] for s in facts["sources"].values()) == num_loss
    assert sum(s["num_truncated"] for s in facts["sources"].values()) == 10


def test_the_answers_given_most_often_are_shown_with_their_text() -> None:
    samples = [sample_of(n, [*range(10, 20), STOP]) for n in range(3)]
    tally = Tally(SPEC)

    tally.add(read_shard_of([*samples, *healthy(5, 10)], [words("No idea.")] * 8))

    assert tally.top_repeats() == [{"count": 3, "text": "No idea."}]


def test_samples_whose_rows_are_gone_are_judged_by_their_ids() -> None:
    tally = Tally(SPEC)

    tally.add(read_shard_of(healthy(10)))

    facts = facts_of(tally)
    assert (facts["num_samples"], facts["num_with_words"]) == (10, 0)
    assert list(facts["sources"]) == [UNKNOWN_SOURCE]


def test_sources_without_number_are_counted_together() -> None:
    num = MAX_SOURCES + 50
    said = [words(source=f"f{n}") for n in range(num)]
    tally = Tally(SPEC)

    tally.add(read_shard_of(healthy(num), said))

    assert len(tally.sources) == MAX_SOURCES + 1
    assert tally.sources[OTHER_SOURCES].num_samples == 50
