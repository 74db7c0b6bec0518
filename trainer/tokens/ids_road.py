"""A target's answers -> samples: the ids road.

Called by build.py for what workers committed. Ids are taken as the engine was prompted and as it
sampled; nothing is tokenised. One sample per answer with its own prompt, because a later prompt
need not continue an earlier answer: templates drop thinking, and text tokenises otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from dflash_workers.contract.flags import TRUNCATED
from dflash_workers.contract.records import RunSpec
from trainer.tokens.answered import Answered
from trainer.tokens.fitness import skip_reason
from trainer.tokens.shards import Sample


def samples_of(answers: Iterable[Answered], spec: RunSpec) -> tuple[list[Sample], Counter[str]]:
    """A sample per answer that trains; how many do not, by reason."""
    samples: list[Sample] = []
    skipped: Counter[str] = Counter()
    for answer in answers:
        reason = skip_reason(answer.output_ids, answer.flags, spec.sampling.stop_token_ids)
        if reason:
            skipped[reason] += 1
        else:
            samples.append(_sample(answer, spec))
    return samples, skipped


def _sample(answer: Answered, spec: RunSpec) -> Sample:
    prompt, sampled = answer.input_ids, answer.output_ids
    # An engine that reaches the limit by the stop id may say "length"; the ids know better.
    ended = int(sampled[-1]) in spec.sampling.stop_token_ids
    thinking_ends = np.flatnonzero(sampled == spec.thinking_end_id)
    return Sample(
        prompt_key=answer.key,
        id=answer.id,
        turn=answer.turn,
        ids=np.concatenate((prompt, sampled)),
        prompt_len=len(prompt),
        thinking_end=len(prompt) + int(thinking_ends[0]) if len(thinking_ends) else -1,
        heldout=answer.heldout,
        finish_reason="stop" if ended else answer.finish_reason,
        flags=[f for f in answer.flags if not (ended and f == TRUNCATED)],
    )
