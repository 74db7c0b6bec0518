r"""What a drafter is worth on held-out prompts in a real server: headline.sh's third stage.

    python -m benchmarks.h200.headline.measure prompts --model M --prompts PROMPTS --out asked.json
    python -m benchmarks.h200.headline.measure serve --plain URL --drafted URL \
        --asked asked.json --out measured.json

`serve` has both servers up, on one GPU, and asks one at a time; findings.py says what came of it.
First each prompt at temperature 0 and SAMPLED, for the server's own count of verify steps; then the
same replies once more for their speed, plain and drafted in turns, each as long as the plain
server's had been, so that both say as many tokens. Replies that end in loops are left out of all of
it, and their share is said. The first token of a reply, which comes with the prompt, counts for
neither side.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import orjson

from benchmarks.asking import ask
from benchmarks.fill_live import flush_cache
from benchmarks.h200.headline.prompt_sets import read_rows
from benchmarks.served import Asked, Replies
from dflash_workers.contract.chat import load_tokenizer, open_chat, own_template
from dflash_workers.contract.flags import is_repetitive
from dflash_workers.contract.records import Json

SAMPLED = 0.8
# Streams and how many prompts are asked through so many: some seconds a pass each.
PROMPTS_AT = {1: 16, 8: 64, 48: 384}
REPEATS = 3
ASKED_AT_ONCE = 48
MIN_TOKENS = 16  # of a reply whose speed is measured


@dataclass(frozen=True, slots=True)
class Heldout:
    """Prompts that were never trained on, domain by domain in turns."""

    prompts: list[list[int]]
    domains: list[str]
    stop_ids: list[int]
    max_new_tokens: int

    def asked(self) -> Asked:
        """Without the domains."""
        return Asked(self.prompts, self.stop_ids, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one number of streams: tokens of a pass, and seconds of each pass by side."""

    num_tokens: int
    plain_s: list[float] = field(default_factory=list)
    drafted_s: list[float] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Of the medians."""
        return statistics.median(self.plain_s) / statistics.median(self.drafted_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """All that two servers were asked."""

    plain: Replies
    drafted: Replies
    sampled: Replies  # of the drafted server, at SAMPLED
    speeds: dict[str, Speeds]  # by number of streams


def main(arguments: list[str]) -> int:
    """The command."""
    args = _parser().parse_args(arguments)
    args.run(args)
    return 0


def take_prompts(args: argparse.Namespace) -> None:
    """The held-out files' prompts, as ids."""
    template = args.chat_template and args.chat_template.read_text(encoding="utf-8")
    tokenizer = load_tokenizer(args.model)
    chat = open_chat(args.model, template or own_template(tokenizer), {})
    by_domain = {p.stem: read_rows(p) for p in sorted((args.prompts / "heldout").glob("*.jsonl"))}
    named = [[(name, text) for text in texts] for name, texts in by_domain.items()]
    turns = [pair for pair in chain(*zip_longest(*named)) if pair][: args.count]
    ids = [chat.prompt_ids([{"role": "user", "content": text}], []) for _, text in turns]
    domains = [name for name, _ in turns]
    end = tokenizer.eos_token_id
    _write(args.out, asdict(Heldout(ids, domains, [end], args.max_new_tokens)))


def serve(args: argparse.Namespace) -> None:
    """Ask both servers."""
    heldout = read_heldout(args.asked)
    plain = reply_to_all(args.plain, heldout, 0.0)
    drafted = reply_to_all(args.drafted, heldout, 0.0)
    sampled = reply_to_all(args.drafted, heldout, SAMPLED)
    speeds = {}
    for streams, count in PROMPTS_AT.items():
        requests = timed_requests(heldout, plain, count)
        speeds[str(streams)] = alternate(args.plain, args.drafted, requests, streams)
    _write(args.out, asdict(Measured(plain, drafted, sampled, speeds)))


def reply_to_all(url: str, heldout: Heldout, temperature: float) -> Replies:
    """Each prompt's reply, many asked at once."""
    sampling = {
        "temperature": temperature,
        "max_new_tokens": heldout.max_new_tokens,
        "stop_token_ids": heldout.stop_ids,
    }
    requests = [(prompt, sampling) for prompt in heldout.prompts]
    replies, seconds = ask_all(url, requests, ASKED_AT_ONCE)
    ids = [reply["output_ids"] for reply in replies]
    steps = [reply["meta_info"].get("spec_verify_ct", 0) for reply in replies]
    return Replies(ids, steps, seconds)


def timed_requests(heldout: Heldout, plain: Replies, count: int) -> list[tuple[list[int], Json]]:
    """The first `count` whose plain reply is no loop and long enough, to be said at that length."""
    pairs = zip(heldout.prompts, plain.ids, strict=True)
    fitting = [(p, ids) for p, ids in pairs if len(ids) >= MIN_TOKENS and not is_repetitive(ids)]
    return [
        (prompt, {"temperature": 0, "max_new_tokens": len(ids), "ignore_eos": True})
        for prompt, ids in fitting[:count]
    ]


def alternate(
    plain: str, drafted: str, requests: list[tuple[list[int], Json]], streams: int
) -> Speeds:
    """Plain, drafted, plain, drafted: REPEATS passes of each, after a short one without a clock."""
    speeds = Speeds(sum(int(sampling["max_new_tokens"]) for _, sampling in requests))
    for number in range(1 + REPEATS):
        for url, seconds in ((plain, speeds.plain_s), (drafted, speeds.drafted_s)):
            flush_cache(url)
            if number:
                seconds.append(ask_all(url, requests, streams)[1])
            else:
                ask_all(url, requests[:streams], streams)
    print(f"{streams} streams: {speeds.speedup:.3f}x", flush=True)
    return speeds


def ask_all(
    url: str, requests: Sequence[tuple[list[int], Json]], streams: int
) -> tuple[list[Json], float]:
    """Replies in the requests' order, and the seconds that all took."""
    began = time.monotonic()
    with ThreadPoolExecutor(streams) as askers:
        replies = list(askers.map(lambda request: ask(url, *request), requests))
    return replies, time.monotonic() - began


def macro_accept_length(domains: Sequence[str], replies: Replies) -> tuple[float, dict[str, float]]:
    """Tokens per verify step: the mean of the domains' means over prompts, and those."""
    by_domain: dict[str, list[float]] = defaultdict(list)
    for domain, ids, steps in zip(domains, replies.ids, replies.num_steps, strict=True):
        if steps and not is_repetitive(ids):
            by_domain[domain].append((len(ids) - 1) / steps)
    means = {domain: statistics.fmean(values) for domain, values in by_domain.items()}
    return statistics.fmean(means.values()), means


def read_heldout(path: Path) -> Heldout:
    """What `prompts` wrote."""
    return Heldout(**orjson.loads(path.read_bytes()))


def read_measured(path: Path) -> Measured:
    """What `serve` wrote."""
    facts = orjson.loads(path.read_bytes())
    return Measured(
        Replies(**facts["plain"]),
        Replies(**facts["drafted"]),
        Replies(**facts["sampled"]),
        {streams: Speeds(**speeds) for streams, speeds in facts["speeds"].items()},
    )


def _write(path: Path, value: Json) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(orjson.dumps(value))
    draft.rename(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    stages = parser.add_subparsers(required=True)

    def stage(name: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        made = stages.add_parser(name)
        made.set_defaults(run=run)
        made.add_argument("--out", type=Path, required=True)
        return made

    taking = stage("prompts", take_prompts)
    taking.add_argument("--model", required=True)
    taking.add_argument("--prompts", type=Path, required=True)
    taking.add_argument("--chat-template", type=Path, help="in place of the model's own")
    taking.add_argument("--count", type=int, default=400)
    taking.add_argument("--max-new-tokens", type=int, default=256)
    serving = stage("serve", serve)
    serving.add_argument("--plain", required=True, help="URL of a server without a drafter")
    serving.add_argument("--drafted", required=True, help="URL of one with it")
    serving.add_argument("--asked", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
