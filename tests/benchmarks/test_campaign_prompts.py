"""The prompts of a campaign."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.campaign.prompts import Source, number_of
from tests.faults.processes import ROOT


def test_a_prompt_is_a_function_of_its_number_and_no_two_are_alike() -> None:
    source, same = Source(7, 300, 0.2), Source(seed=7, num_bytes=300, two_turns=0.2)

    rows = [source.row(number) for number in range(1000)]

    assert rows == [same.row(number) for number in range(1000)]
    assert len({text for number in range(1000) for text in source.texts(number)}) > 1000
    assert source.row(5) != Source(8, 300, 0.2).row(5)


def test_prompts_are_as_long_as_asked_and_as_many_have_two_turns() -> None:
    source = Source(seed=7, num_bytes=1000, two_turns=0.25)

    texts = [source.texts(number) for number in range(2000)]

    sizes = [sum(map(len, told)) for told in texts]
    assert 950 < sum(sizes) / len(sizes) < 1050
    assert min(sizes) < 600 < 1400 < max(sizes)
    assert 0.2 < sum(len(told) == 2 for told in texts) / len(texts) < 0.3


def test_a_prompt_says_its_number_by_its_id_and_in_each_text() -> None:
    source = Source(seed=7, num_bytes=300, two_turns=1.0)

    row = json.loads(source.row(123))

    said = [message["content"] for message in row["messages"] if message["role"] == "user"]
    assert said == source.texts(123)
    assert [number_of(text) for text in (row["id"], *said)] == [123, 123, 123]
    assert number_of("somebody else's") is None


def test_the_stream_holds_the_rows_that_were_asked_for() -> None:
    flags = ["7", "90", "20", "300", "0.2"]

    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.campaign.prompts", *flags],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )

    source = Source(7, 300, 0.2)
    assert made.stdout == b"".join(source.row(number) for number in range(90, 110))
