"""What a run's samples are like, counted one by one in memory that does not grow with them.

Fed shard by shard by judge.py; gives the counts that rules.py judges and the facts of the report.
An answer that the tokenizer left out (empty, looping, garbled) is in no shard: its count comes from
the shard's provenance, so that a run can't hide what is wrong with it by dropping that. Detectors
are the workers' own (contract/flags.py) where both look for the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dflash_workers.contract.flags import (
    EMPTY,
    REPETITION,
    TOOL_CALL_LOOP,
    UNFINISHED_THINKING,
    is_repetitive,
)
from dflash_workers.contract.records import Json, RunSpec
from trainer.gate.benchmarks import Benchmarks
from trainer.gate.distribution import Distribution
from trainer.gate.minhash import NearDuplicates
from trainer.gate.reading import ReadShard, Words
from trainer.gate.refusals import is_refusal
from trainer.gate.repeats import Repeats
from trainer.gate.rules import FEW_LOSS_TOKENS, FEW_THINKING_TOKENS, SHORT_LIMIT, Share
from trainer.gate.scripts import count_scripts, main_script
from trainer.tokens.shards import Sample

MAX_SOURCES = 200  # named one by one; later ones are counted together
LONGER_ANSWER = 24  # tokens; shorter answers are alike for good reasons
NUM_TOP = 10
EXCERPT_CHARS = 160
UNKNOWN_SOURCE, OTHER_SOURCES = "(unknown)", "(others)"
LENGTH = "length"


@dataclass(slots=True)
class SourceCounts:
    """The samples of one file or place."""

    num_samples: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_empty: int = 0
    num_truncated: int = 0


@dataclass(slots=True)
class Counts:
    """Plain counts over all samples."""

    samples: int = 0
    heldout: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    thinking_tokens: int = 0
    empty: int = 0
    truncated: int = 0
    loops: int = 0
    thinking: int = 0
    with_tools: int = 0
    with_calls: int = 0
    refusals: int = 0
    with_words: int = 0
    overlaps: int = 0
    quarantined: int = 0
    shards: int = 0
    shards_of_other_tokenizer: int = 0


@dataclass(slots=True)
class Tally:
    """All of a run so far."""

    spec: RunSpec
    benchmarks: Benchmarks | None = None
    counts: Counts = field(default_factory=Counts)
    skipped: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)  # "key: what is wrong with it"
    output_tokens: Distribution = field(default_factory=Distribution)
    prompt_tokens: Distribution = field(default_factory=Distribution)
    loss_percent: Distribution = field(default_factory=Distribution)
    thinking_tokens: Distribution = field(default_factory=Distribution)
    turns: Counter[int] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    roads: Counter[str] = field(default_factory=Counter)
    tokenizers: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    main_scripts: Counter[str] = field(default_factory=Counter)
    overlaps: Counter[str] = field(default_factory=Counter)
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    repeats: Repeats = field(default_factory=Repeats)
    duplicates: NearDuplicates = field(default_factory=NearDuplicates)

    def add(self, shard: ReadShard) -> None:
        """Count a shard in."""
        provenance = shard.provenance
        self.counts.shards += 1
        self.counts.quarantined += shard.num_quarantined
        self.skipped.update(provenance["skipped"])
        self.roads[provenance["road"]] += 1
        self.tokenizers[provenance["tokenizer_sha256"]] += 1
        if provenance["tokenizer_sha256"] != self.spec.target.tokenizer_sha256:
            self.counts.shards_of_other_tokenizer += 1
        for sample, words in shard.pairs():
            self._add_sample(sample, words)

    @property
    def num_answers(self) -> int:
        """Samples, and answers that the tokenizer left out."""
        return self.counts.samples + self.skipped.total()

    def shares(self) -> dict[str, Share]:
        """What the rules judge, by their names."""
        counts, skipped = self.counts, self.skipped
        num_loops = counts.loops + skipped[REPETITION] + skipped[TOOL_CALL_LOOP]
        top = self.repeats.top(1)
        num_shards = counts.shards + len(self.unreadable)
        shares = {
            "empty_answers": Share(counts.empty + skipped[EMPTY], self.num_answers),
            "near_duplicates": Share(self.duplicates.num_repeats, self.duplicates.num_seen),
            "loops": Share(num_loops, self.num_answers),
            "dominating_answer": Share(top[0].count if top else 0, counts.samples),
            "tokenizer_mismatch": Share(counts.shards_of_other_tokenizer, counts.shards),
            "unreadable": Share(len(self.unreadable), num_shards),
        }
        return shares | self._shares_that_may_not_apply()

    def _shares_that_may_not_apply(self) -> dict[str, Share]:
        counts, limit = self.counts, self.spec.sampling.max_new_tokens
        short = f"the run's limit of {limit:,} new tokens is below {SHORT_LIMIT:,}"
        num_missing = counts.samples - counts.thinking
        rows = (
            ("truncated", counts.truncated, counts.samples, limit >= SHORT_LIMIT, short),
            (
                *("thinking_missing", num_missing, counts.samples),
                *(self._is_thinking_asked, "the run does not ask for thinking"),
            ),
            (
                *("benchmark_overlap", counts.overlaps, counts.with_words),
                *(self.benchmarks is not None, "no file of a benchmark's prompts was given"),
            ),
        )
        return {
            name: Share(count, total) if applies else Share(0, 0, f"skipped: {why_not}")
            for name, count, total, applies, why_not in rows
        }

    @property
    def _is_thinking_asked(self) -> bool:
        return self.spec.template_kwargs.get("enable_thinking") is True

    def _add_sample(self, sample: Sample, words: Words | None) -> None:
        answer = sample.ids[sample.prompt_len :]
        thinking = max(sample.thinking_end - sample.prompt_len, 0)
        is_empty = len(answer) <= FEW_LOSS_TOKENS or (
            EMPTY in sample.flags and UNFINISHED_THINKING not in sample.flags
        )
        counts = self.counts
        counts.samples += 1
        counts.heldout += sample.heldout
        counts.tokens += len(sample.ids)
        counts.loss_tokens += len(answer)
        counts.thinking_tokens += thinking
        counts.empty += is_empty
        counts.truncated += sample.finish_reason == LENGTH
        counts.loops += _is_looping(sample)
        counts.thinking += _thinks(sample, words)
        self.output_tokens.add(len(answer))
        self.prompt_tokens.add(sample.prompt_len)
        self.loss_percent.add(round(100 * len(answer) / len(sample.ids)))
        if thinking:
            self.thinking_tokens.add(thinking)
        self.turns[sample.turn] += 1
        self.finish_reasons[sample.finish_reason] += 1
        self.flags.update(sample.flags)
        self.repeats.add(answer.tobytes(), _excerpt(sample, words))
        if len(answer) >= LONGER_ANSWER:
            self.duplicates.add(answer)
        self._add_to_source(sample, words, is_empty)
        if words:
            self._add_words(words)

    def _add_words(self, words: Words) -> None:
        counts = self.counts
        counts.with_words += 1
        counts.with_tools += words.num_tools > 0
        counts.with_calls += words.num_calls > 0
        counts.refusals += is_refusal(words.content)
        letters = count_scripts(words.reasoning + words.content)
        self.letters.update(letters)
        self.main_scripts[main_script(letters)] += 1
        if self.benchmarks and (name := self.benchmarks.find(words.asked)):
            counts.overlaps += 1
            self.overlaps[name] += 1

    def _add_to_source(self, sample: Sample, words: Words | None, is_empty: bool) -> None:
        name = words.source if words else UNKNOWN_SOURCE
        if name not in self.sources and len(self.sources) >= MAX_SOURCES:
            name = OTHER_SOURCES
        source = self.sources.setdefault(name, SourceCounts())
        source.num_samples += 1
        source.num_tokens += len(sample.ids)
        source.num_loss_tokens += len(sample.ids) - sample.prompt_len
        source.num_empty += is_empty
        source.num_truncated += sample.finish_reason == LENGTH

    def top_repeats(self) -> list[Json]:
        """The answers given most often."""
        return [{"count": r.count, "text": r.text} for r in self.repeats.top(NUM_TOP)]


def _is_looping(sample: Sample) -> bool:
    if REPETITION in sample.flags or TOOL_CALL_LOOP in sample.flags:
        return True
    has_stop_id = sample.finish_reason == "stop"
    answer = sample.ids[sample.prompt_len : len(sample.ids) - has_stop_id]
    return is_repetitive(answer.tolist())


def _thinks(sample: Sample, words: Words | None) -> bool:
    if sample.thinking_end - sample.prompt_len > FEW_THINKING_TOKENS:
        return True
    if UNFINISHED_THINKING in sample.flags:
        return True
    return bool(words and words.reasoning.strip())


def _excerpt(sample: Sample, words: Words | None) -> str:
    if words is None:
        return f"({len(sample.ids) - sample.prompt_len} tokens, as in {sample.id})"
    return (words.content or words.reasoning)[:EXCERPT_CHARS]
