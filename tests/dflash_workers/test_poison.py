"""The prompt that kills is found and rejected, and no other: in play, and as noted in Redis."""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Callable

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from dflash_workers.claims import Claim
from dflash_workers.contract.errors import Draining, EngineUnavailable, LeaseLost, QueueUnavailable
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import JOURNAL_S, RedisKeys
from dflash_workers.contract.records import BatchMessage, Prompt, Turn
from dflash_workers.poison import (
    EVIDENCE_CHARS,
    SILENT_ENDS,
    Case,
    Death,
    History,
    Suspects,
    describe_death,
    schedule,
    suspicion_of,
)

MESSAGE = BatchMessage("run", 0, "b")
KEY_NAME = "0/b"


def make_prompts(num: int) -> list[Prompt]:
    turns = [Turn([{"role": "user", "content": "hello"}])]
    return [Prompt(f"p{i}", f"id{i}", turns, [], False, "here:1") for i in range(num)]


PROMPTS = make_prompts(4)


def deaths(*those: str, alone: bool = False) -> list[Death]:
    """One death per text; each names its prompts, parted by blanks."""
    return [Death(those.split(), alone, f"exit status -{i}") for i, those in enumerate(those)]


def keys(prompts: list[Prompt]) -> list[str]:
    return [prompt.key for prompt in prompts]


def test_one_death_may_be_anybodys() -> None:
    plan = schedule(PROMPTS, History(deaths("p0 p1 p2 p3")))

    assert keys(plan.together) == ["p0", "p1", "p2", "p3"]
    assert plan.alone == []


def test_who_ran_at_two_deaths_runs_alone_after_the_others() -> None:
    plan = schedule(PROMPTS, History(deaths("p0 p1 p2", "p1 p2 p3")))

    assert keys(plan.together) == ["p0", "p3"]
    assert keys(plan.alone) == ["p1", "p2"]
    assert plan.condemned == []


def test_the_least_suspect_of_the_suspects_runs_first() -> None:
    history = History(deaths("p0 p1 p2", "p0 p1 p2", "p0 p2") + deaths("p0", alone=True))

    assert keys(schedule(PROMPTS[:3], history).alone) == ["p1", "p2", "p0"]


def test_who_takes_the_engine_down_alone_twice_is_condemned_with_the_evidence() -> None:
    history = History(deaths("p0 p1", "p0 p1") + deaths("p1", "p1", alone=True))

    plan = schedule(PROMPTS, history)

    assert [(prompt.key, evidence) for prompt, evidence in plan.condemned] == [
        ("p1", "exit status -1")
    ]
    assert suspicion_of("p1", history).num_deaths == 4
    assert keys(plan.alone) == ["p0"]


def test_workers_that_went_silent_say_nothing_about_a_prompt_unless_they_do_so_in_series() -> None:
    gone = ["p1"] * 4

    assert schedule(PROMPTS, History(gone_alone=gone)).together == PROMPTS
    plan = schedule(PROMPTS, History(gone_alone=gone, is_struck=True))

    assert [prompt.key for prompt, _ in plan.condemned] == ["p1"]
    assert "fell silent 4 times" in plan.condemned[0][1]
    assert keys(plan.alone) == ["p0", "p2", "p3"]


@given(st.integers(1, 24), st.integers(0, 4), st.integers(0, 1 << 32))
def test_exactly_the_poisonous_are_condemned_and_the_engine_dies_no_more_than_needed(
    num_prompts: int, num_poisonous: int, seed: int
) -> None:
    chance = random.Random(seed)
    prompts = make_prompts(num_prompts)
    poisonous = set(chance.sample(keys(prompts), min(num_poisonous, num_prompts)))
    history, ended, condemned = History(), set[str](), set[str]()

    def run(batch: list[Prompt]) -> bool:
        """Whether the engine survives. What ends before it dies stays ended."""
        nonlocal history
        innocent = [key for key in keys(batch) if key not in poisonous]
        if len(innocent) == len(batch):
            ended.update(innocent)
            return True
        ended.update(chance.sample(innocent, chance.randint(0, len(innocent))))
        running = [key for key in keys(batch) if key not in ended]
        death = Death(running, len(batch) == 1, "exit status -9")
        history = dataclasses.replace(history, deaths=[*history.deaths, death])
        return False

    while left := [p for p in prompts if p.key not in ended | condemned]:
        plan = schedule(left, history)
        assert sorted(keys(left)) == sorted(
            keys(plan.together) + keys(plan.alone) + [p.key for p, _ in plan.condemned]
        )
        condemned |= {prompt.key for prompt, _ in plan.condemned}
        if plan.together and not run(plan.together):
            continue
        for prompt in plan.alone:
            if not run([prompt]):
                break

    assert condemned == poisonous
    assert ended == set(keys(prompts)) - poisonous
    assert len(history.deaths) <= (2 + 2 * len(poisonous) if poisonous else 0)


@pytest.mark.parametrize(
    ("what", "tail", "described"),
    [
        ("exit status -9", "", "exit status -9"),
        ("exit status 1", "a\n\n  b\n", "exit status 1 | a | b"),
        ("died", "\x1b[31mred\x1b[0m\x07\ttab\r\nend", r"died | red\x07\ttab | end"),
        ("died", "left\u202eright \ud800", r"died | left\u202eright \ud800"),
    ],
)
def test_evidence_is_one_line_of_plain_text(what: str, tail: str, described: str) -> None:
    assert describe_death(what, tail) == described


@given(st.text(), st.text())
def test_evidence_is_short_and_keeps_what_was_observed(what: str, tail: str) -> None:
    evidence = describe_death(what, tail * 50)

    assert len(evidence) <= EVIDENCE_CHARS
    assert evidence.isprintable()
    assert describe_death("exit status -9", tail * 50).startswith("exit status -9")


def test_of_a_long_log_the_end_is_kept() -> None:
    evidence = describe_death("exit status -9", "\n".join(f"line {i}" for i in range(1000)))

    assert evidence.startswith("exit status -9 | ...")
    assert evidence.endswith("| line 998 | line 999")


Open = Callable[..., Case]


@pytest.fixture
def suspects(hints: Hints) -> Suspects:
    return Suspects(hints.redis, hints.keys, hints.where)


@pytest.fixture
def open_case(suspects: Suspects) -> Open:
    """The case as a new holder finds it after its claim."""
    attempts = iter(range(100))

    def open_case() -> Case:
        case = suspects.open(Claim(MESSAGE, f"attempt-{next(attempts)}"))
        case.load()
        return case

    return open_case


class Killed(BaseException):
    """Stands for the end of a process: no handler of ours sees it."""


def fall_silent(case: Case, alone: str = "") -> None:
    with pytest.raises(Killed), case.attending():
        if alone:
            case.note_running(alone)
        raise Killed


def test_the_next_holder_knows_who_ran_when_the_engine_died(open_case: Open) -> None:
    first = open_case()
    first.blame(["p0", "p1"], "exit status -9", "CUDA error", alone=False)
    open_case().blame(["p1"], "exit status -11", alone=True)

    case = open_case()

    assert case.of("p0").num_deaths == 1
    assert (case.of("p1").num_deaths, case.of("p1").num_alone) == (2, 1)
    assert case.of("p1").evidence == "exit status -11"
    assert case.of("p0").evidence == "exit status -9 | CUDA error"
    assert case.of("p2").num_deaths == 0


def test_this_holder_knows_what_it_noted_itself(open_case: Open) -> None:
    case = open_case()

    case.blame(["p0"], "refused", alone=False)
    case.blame(["p0"], "refused", alone=False)

    assert keys(schedule(PROMPTS, case.history).alone) == ["p0"]


def test_a_death_that_was_none_speaks_against_nobody(open_case: Open) -> None:
    case = open_case()
    case.blame(["p0", "p1"], "exit status -9", alone=False)

    case.absolve(case.blame(["p0"], "cannot connect", alone=True))

    for holder in (case, open_case()):
        assert (holder.of("p0").num_deaths, holder.of("p0").num_alone) == (1, 0)
        assert holder.of("p1").num_deaths == 1


def test_a_death_that_was_none_may_be_forgotten_already(
    open_case: Open, hints: Hints, redis_client: redis.Redis
) -> None:
    case = open_case()
    name = case.blame(["p0"], "cannot connect", alone=False)
    redis_client.delete(hints.keys.suspects("run", KEY_NAME))
    case.load()

    case.absolve(name)

    assert case.history == History()


def test_a_batch_is_inherited_from_who_fell_silent_and_from_nobody_else(open_case: Open) -> None:
    first = open_case()
    with pytest.raises(Draining), first.attending():
        raise Draining("leaving")
    after_a_goodbye = open_case()
    fall_silent(after_a_goodbye)
    after_a_silence = open_case()

    assert not first.is_inherited
    assert not after_a_goodbye.is_inherited
    assert after_a_silence.is_inherited


def test_other_batches_and_runs_are_cases_of_their_own(suspects: Suspects, open_case: Open) -> None:
    open_case().blame(["p0"], "refused", alone=False)

    for message in (BatchMessage("run", 1, "b"), BatchMessage("other", 0, "b")):
        other = suspects.open(Claim(message, "attempt"))
        other.load()
        assert other.of("p0").num_deaths == 0


def test_notes_outlive_the_last_by_a_day(
    open_case: Open, hints: Hints, redis_client: redis.Redis
) -> None:
    case = open_case()
    key = hints.keys.suspects("run", KEY_NAME)

    notes: list[Callable[[], None]] = [
        case.note_running,
        lambda: case.blame(["p0"], "refused", alone=False),
    ]

    for note in notes:
        note()
        redis_client.expire(key, 10)
        note()
        assert JOURNAL_S - 5 <= redis_client.ttl(key) <= JOURNAL_S


def test_a_batch_that_went_well_leaves_nothing_behind(
    open_case: Open, hints: Hints, redis_client: redis.Redis
) -> None:
    case = open_case()

    with case.attending():
        case.note_progress()

    assert redis_client.exists(hints.keys.suspects("run", KEY_NAME)) == 0


def test_a_node_that_is_gone_counts_nothing(open_case: Open) -> None:
    for _ in range(SILENT_ENDS - 1):
        fall_silent(open_case())

    case = open_case()

    assert case.history == History()
    assert schedule(PROMPTS, case.history).together == PROMPTS


def test_workers_that_fall_silent_in_series_make_all_that_is_left_run_alone(
    open_case: Open,
) -> None:
    for _ in range(SILENT_ENDS):
        fall_silent(open_case())

    case = open_case()

    assert schedule(PROMPTS, case.history).alone == PROMPTS


def test_a_new_row_ends_the_series(open_case: Open) -> None:
    for _ in range(SILENT_ENDS - 1):
        fall_silent(open_case())
    case = open_case()
    with pytest.raises(Killed), case.attending():
        case.note_progress()
        raise Killed  # the first of the next series

    for _ in range(SILENT_ENDS - 2):
        fall_silent(open_case())
    assert not open_case().history.is_struck
    fall_silent(open_case())

    assert open_case().history.is_struck


@pytest.mark.parametrize("error", [Draining, LeaseLost, EngineUnavailable])
def test_a_worker_that_says_what_went_wrong_has_not_fallen_silent(
    open_case: Open, error: type[Exception]
) -> None:
    for _ in range(2 * SILENT_ENDS):
        with pytest.raises(error), open_case().attending():
            raise error("said")

    assert not open_case().history.is_struck


def test_an_unexpected_error_of_our_own_code_is_a_silent_end(open_case: Open) -> None:
    for _ in range(SILENT_ENDS):
        with pytest.raises(KeyError), open_case().attending():
            raise KeyError

    assert open_case().history.is_struck


def test_a_holder_that_looks_again_does_not_count_itself(open_case: Open) -> None:
    for _ in range(SILENT_ENDS - 1):
        fall_silent(open_case())
    case = open_case()

    with case.attending():
        case.load()

        assert not case.history.is_struck


def test_rows_of_others_do_not_clear_whoever_ran_alone_when_a_worker_fell_silent(
    open_case: Open,
) -> None:
    for _ in range(SILENT_ENDS):
        fall_silent(open_case())

    for _ in range(2):
        case = open_case()
        case.note_running("p0")
        case.note_progress()
        fall_silent(case, alone="p2")

    condemned = schedule(PROMPTS, open_case().history).condemned
    assert [prompt.key for prompt, _ in condemned] == ["p2"]


@given(st.integers(1, 8), st.integers(0, 1 << 32))
@settings(max_examples=10, deadline=None)
def test_a_prompt_that_kills_its_worker_is_found_whatever_else_happens(
    redis_url: str, num_prompts: int, seed: int
) -> None:
    chance = random.Random(seed)
    prompts = make_prompts(num_prompts)
    poisonous = chance.choice(keys(prompts))
    with redis.Redis.from_url(redis_url) as client:
        suspects = Suspects(client, RedisKeys(f"test-{uuid.uuid4().hex}:"), "here")
        ended, condemned = set[str](), set[str]()

        def hold() -> None:
            case = suspects.open(Claim(MESSAGE, uuid.uuid4().hex))
            case.load()
            plan = schedule([p for p in prompts if p.key not in ended], case.history)
            condemned.update(prompt.key for prompt, _ in plan.condemned)
            with case.attending():
                for group in [plan.together, *([prompt] for prompt in plan.alone)]:
                    case.note_running("" if group is plan.together else group[0].key)
                    innocent = [key for key in keys(group) if key != poisonous]
                    num_ended = len(innocent)
                    if len(innocent) < len(group):
                        num_ended = chance.randint(0, num_ended)
                    ended.update(innocent[:num_ended])
                    if num_ended:
                        case.note_progress()
                    if len(innocent) < len(group):
                        raise Killed

        num_killed = 0
        while ended | condemned != set(keys(prompts)):
            try:
                hold()
            except Killed:
                num_killed += 1

    assert condemned == {poisonous}
    # Each row that ends before a kill may end a series.
    assert num_killed <= (SILENT_ENDS + 2) * num_prompts


def test_with_redis_away_deaths_are_kept_and_written_once_it_is_back(
    suspects: Suspects, open_case: Open, caplog: pytest.LogCaptureFixture
) -> None:
    away = redis.Redis(port=1, socket_connect_timeout=0.2, retry=Retry(NoBackoff(), 0))
    case = dataclasses.replace(suspects, redis=away).open(Claim(MESSAGE, "here"))
    with pytest.raises(QueueUnavailable):
        case.load()

    with case.attending():
        case.blame(["p0"], "refused", alone=False)
        assert case.of("p0").num_deaths == 1
        assert open_case().of("p0").num_deaths == 0
        case._of = suspects
        case.blame(["p1"], "refused", alone=False)

    found = open_case()
    assert (found.of("p0").num_deaths, found.of("p1").num_deaths) == (1, 1)
    assert "suspects are kept here for now" in caplog.text


def test_what_was_written_is_not_written_again(
    open_case: Open, hints: Hints, redis_client: redis.Redis
) -> None:
    case = open_case()
    case.note_running()
    redis_client.delete(hints.keys.suspects("run", KEY_NAME))

    case.blame(["p0"], "refused", alone=False)

    assert redis_client.hlen(hints.keys.suspects("run", KEY_NAME)) == 1


def test_a_note_of_another_version_is_ignored(
    open_case: Open, hints: Hints, redis_client: redis.Redis
) -> None:
    redis_client.hset(hints.keys.suspects("run", KEY_NAME), "death:1", b'{"prompts": 3}')
    redis_client.hset(hints.keys.suspects("run", KEY_NAME), "verdict", b"?")

    assert open_case().history == History()
