"""What the gate demands: one table of rules, and the verdict of each.

Counts come from tally.py, verdicts go to judge.py and from there to the report and to training. A
rule fails where its share is above what it allows. Few answers prove little, so that a rule about
the spread of many is judged from `min_total` on only. A person may override a rule by its name;
the verdict says so, and so does the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dflash_workers.contract.errors import BadInput

FEW_LOSS_TOKENS = 6  # an answer of no more: an empty turn's header and end
FEW_THINKING_TOKENS = 4  # thinking of no more: its markers and the lines between them
SHORT_LIMIT = 256  # tokens; a run with a lower limit means to cut its answers off

PASS, FAIL, OVERRIDDEN, NOT_JUDGED = "pass", "fail", "overridden", "not judged"


@dataclass(frozen=True, slots=True)
class Rule:
    """A share that may not be too large."""

    name: str
    max_share: float  # 0 to 1; above it the rule fails
    min_total: int  # with fewer than these it is not judged
    what: str  # is counted, for people


RULES = (
    Rule(
        "empty_answers",
        0.25,
        8,
        f"of the answers have no content or at most {FEW_LOSS_TOKENS} tokens to learn from",
    ),
    Rule("truncated", 0.5, 100, "of the samples were cut off by the length limit"),
    Rule("near_duplicates", 0.3, 50, "of the longer answers nearly repeat an earlier one"),
    Rule("loops", 0.1, 50, "of the answers end in a loop or call tools without end"),
    Rule("dominating_answer", 0.05, 100, "of the samples have one and the same answer"),
    Rule("thinking_missing", 0.2, 8, "of the samples do not think, though the run asks for it"),
    Rule("benchmark_overlap", 0.01, 8, "of the samples ask what a given benchmark asks"),
    Rule("tokenizer_mismatch", 0.0, 1, "of the shards were made with another tokenizer"),
    Rule("unreadable", 0.0, 1, "of the shards can't be read"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """What a rule is about, counted; or why it is not."""

    count: int
    total: int
    why_not: str = ""  # the rule does not apply, because of this


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one rule."""

    rule: str
    outcome: str  # pass | fail | overridden | not judged
    count: int
    total: int
    share: float
    max_share: float
    what: str
    why_not: str  # it was judged; empty where it was

    def sentence(self) -> str:
        """For people: how much of what, and how much is allowed; or why it is not judged."""
        if self.why_not:
            return self.why_not
        return f"{self.counted()}; at most {self.max_share:.0%}"

    def counted(self) -> str:
        """For people: how much of what."""
        return f"{self.count:,} of {self.total:,} ({self.share:.1%}) {self.what}"


def judge(shares: Mapping[str, Share], overrides: Collection[str] = ()) -> list[Verdict]:
    """A verdict per rule, in the table's order. A rule with few counted, or none, is not judged.

    Raises BadInput where an override names no rule.
    """
    names = [rule.name for rule in RULES]
    for name in overrides:
        if name not in names:
            raise BadInput(f"--override {name}: no such rule: one of {', '.join(names)}")
    return [_verdict(rule, shares.get(rule.name, Share(0, 0)), overrides) for rule in RULES]


def _verdict(rule: Rule, share: Share, overrides: Collection[str]) -> Verdict:
    outcome, why_not = PASS, share.why_not
    if share.total < rule.min_total:
        outcome = NOT_JUDGED
        why_not = why_not or f"too few to judge: {share.total:,} of {rule.min_total:,}"
    elif share.count > rule.max_share * share.total:
        outcome = OVERRIDDEN if rule.name in overrides else FAIL
    part = round(share.count / share.total, 6) if share.total else 0.0
    return Verdict(
        rule.name, outcome, share.count, share.total, part, rule.max_share, rule.what, why_not
    )
