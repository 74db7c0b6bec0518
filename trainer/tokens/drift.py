"""Where the text road would differ from the ids road, on the same answers.

`dflash-fleet drift` calls it on a run that workers answered. Each answer is cut out of its
conversation once more as text_road.py does it, and compared with the ids that the engine was
prompted with and sampled. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.records import Answer, Json, Row, RunSpec
from dflash_workers.contract.store import Store
from trainer.tokens.text_road import Cut, TextRoad, open_text_road

# Why an answer's ids differ; the first that holds.
NO_END = "the_text_road_ends_it"  # cut off by the limit, yet re-rendered as if it had stopped
RETOKENIZED = "retokenized"  # the same text, other ids
RESPELLED = "respelled"  # another text: whitespace, calls or thinking as the template writes them
UNMATCHED = "not_in_the_conversation"  # no message says what was answered

EXAMPLES_KEPT = 5


@dataclass(slots=True)
class DriftReport:
    """Over a run's answers, or the first of them."""

    num_answers: int = 0
    num_same: int = 0  # ids and mask
    num_prompts_differ: int = 0
    num_answers_differ: int = 0
    num_masks_differ: int = 0  # another place where loss begins, or another number of tokens
    num_quarantined: int = 0  # the text road can't say what was answered
    why: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # "id, turn 1: retokenized: from id 17 on"


def measure_drift(store: Store, run: str, model_dir: str, limit: int = 0) -> DriftReport:
    """Of a run's first `limit` answers; 0: all. Raises Missing, BadInput, Corrupt."""
    spec = read_spec(store, run)
    road = open_text_road(spec, model_dir)
    report = DriftReport()
    for rows in _batches(store, run):
        for row, cuts in zip(rows, road.cut([(r.messages, r.tools) for r in rows]), strict=True):
            for answer, cut in _paired(row, cuts):
                if limit and report.num_answers == limit:
                    return report
                _compare(row, answer, cut, _Judge(spec, road, report))
    return report


@dataclass(frozen=True, slots=True)
class _Judge:
    spec: RunSpec
    road: TextRoad
    report: DriftReport

    def note(self, row: Row, answer: Answer, why: str, detail: str) -> None:
        counts = self.report.why
        counts[why] = counts.get(why, 0) + 1
        if len(self.report.examples) < EXAMPLES_KEPT:
            self.report.examples.append(f"{row.id}, turn {answer.turn}: {why}: {detail}")


def _batches(store: Store, run: str) -> Iterator[list[Row]]:
    for segment, batch in committed_batches(store, run):
        commit = read_commit(store, run, segment, batch)
        if commit.road == "ids":
            yield read_rows(store, commit)


def _paired(
    row: Row, cuts: list[Cut] | PromptRejected
) -> Iterator[tuple[Answer, Cut | PromptRejected]]:
    """Each answer with the message that says it; others' answers in the history have none."""
    if isinstance(cuts, PromptRejected):
        yield from ((answer, cuts) for answer in row.answers)
        return
    left = iter(cuts)
    for answer in row.answers:
        unmatched = PromptRejected(UNMATCHED, "")
        yield answer, next((cut for cut in left if _says(cut.message, answer)), unmatched)


def _says(message: Json, answer: Answer) -> bool:
    said = (message["content"], message.get("reasoning_content", ""), message.get("tool_calls", []))
    return said == (answer.content, answer.reasoning_content, answer.tool_calls)


def _compare(row: Row, answer: Answer, cut: Cut | PromptRejected, judge: _Judge) -> None:
    report = judge.report
    report.num_answers += 1
    if isinstance(cut, PromptRejected):
        report.num_quarantined += 1
        judge.note(row, answer, cut.reason, cut.detail)
        return
    prompt, sampled = cut.ids[: cut.prompt_len].tolist(), cut.ids[cut.prompt_len :].tolist()
    if prompt == answer.input_ids and sampled == answer.output_ids:
        report.num_same += 1
        return
    report.num_prompts_differ += prompt != answer.input_ids
    report.num_answers_differ += sampled != answer.output_ids
    report.num_masks_differ += len(prompt) != len(answer.input_ids) or len(sampled) != len(
        answer.output_ids
    )
    ours, theirs = answer.input_ids + answer.output_ids, prompt + sampled
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
    judge.note(row, answer, _why(answer, prompt, sampled, judge), f"from id {at} on")


def _why(answer: Answer, prompt: list[int], sampled: list[int], judge: _Judge) -> str:
    stop_ids = judge.spec.sampling.stop_token_ids
    if prompt == answer.input_ids and sampled[:-1] == answer.output_ids and sampled[-1] in stop_ids:
        return NO_END
    ours = judge.road.text(answer.input_ids + answer.output_ids)
    theirs = judge.road.text(prompt + sampled)
    return RETOKENIZED if ours == theirs else RESPELLED
