"""Every key in S3 and in Redis, in one place.

S3, below <prefix>/<run>/ ("once": written with If-None-Match: *, never changed again):

    key                                      written by         content
    run.json                                 producer, once     RunSpec
    plan/log/<n>.json                        producer, once     Segment
    plan/log/<n>.<hash>.refused.jsonl.zst    producer, once     Refusal per line; see Segment
    plan/prompts/<n>.<hash>.jsonl.zst        producer, once     a frame per batch, Prompt per line
    control/<n>.json                         producer, once     ControlEntry
    canary.json                              first worker, once what the engine must reproduce
    serving/<n>.json                         promote, once      ServingEntry
    serving.json                             promote            the last of them, for people
    data/<segment>/<batch>/<attempt>.jsonl.zst  worker, once    Row per line
    commits/<segment>/<batch>.json           worker, once       Commit
    tokens/<version>/<segment>/<batch>.arrow tokenizer, once    samples: ids and loss mask
    tokens/<version>/quarantine/<segment>/<batch>.json  tokenizer, once  why a batch has no shard
    tokens/<version>/compact/<attempt>.arrow compact, once      the samples of many shards
    tokens/<version>/compact/<n>.json        compact, once      which shards those hold
    progress.json                            one worker at a time, by lease
    counted.json.zst                         the same, `status` what progress.json was counted from
    prices.json                              estimate, replaced what a GPU costs
    probe/<random>                           worker's start     removed at once
    train/<name>/order/<n>.json              trainer, once      OrderEntry: the next shards to use
    train/<name>/checkpoints/step-<n>/...    trainer            safetensors; state.json comes last
    train/<name>/holders/<n>.json            trainer, once      who trains under this name
    train/<name>/holders/<n>.beat            trainer, replaced  the holder's sign of life
    train/<name>/metrics.jsonl               trainer, replaced  a line per step
    nodes/<host>/<log>.zst                   node leave         logs, for people; replaced

Beside the runs: models/<target name>/, what `node` without --model serves, put there by people; and
drafters/<id>/, exports that `promote` put there, complete once their SHA256SUMS is there.

Redis, all below one configurable prefix ("dflash:"):

    key                 type        written by          read by       lifetime
    <queue names>       list        Celery              Celery        until received
    pending:<run>       sorted set  producer, claims    reconcile     until claimed (batch, since)
    inflight:<run>      sorted set  claims              reap          until cleared (batch, due)
    lease:<run>:<b>     string      claims              claims        LEASE_MS, renewed
    journal:<run>:<b>   hash        journal             next holder   JOURNAL_S, or the commit
    suspects:<run>:<b>  hash        poison              next holder   JOURNAL_S, or the commit
    progress:<run>      string      progress            progress      lease of the one writer
    events              stream      roll                report        the newest of events.py
    roll                hash        roll                roll          who was seen last, and when
    observer            string      roll                roll          lease of the one observer
    sweep:<run>         string      tokenizers          tokenizers    until the next sweep is due
    tokenizers          string      tokenizers          worker        while any is up
    worker:<slot>       hash        worker              status        WORKER_S, refreshed
    serves:<slot>       hash        node                promote       WORKER_S, refreshed
    turn:<run>          string      node                nodes         while one engine is changed
    promoter:<run>      string      promote             nodes         lease of the one promoter
    dead:<reason>       list        tasks, inbox        people        the newest DEAD_KEPT

A batch is named "<segment>/<batch>" in Redis, so that the name is enough to find its plan.
"""

from __future__ import annotations

from dataclasses import dataclass

LEASE_MS = 15_000
REAP_DEADLINE_MS = 5_000
JOURNAL_S = 24 * 3600
WORKER_S = 15
TURN_S = 60
PROMOTER_S = 30
DEAD_KEPT = 1000

TOKENS_VERSION = "v1"
DRAFTERS = "drafters/"  # beside the runs


@dataclass(frozen=True, slots=True)
class RunKeys:
    """S3 keys of one run, relative to the store's prefix."""

    run: str

    @property
    def spec(self) -> str:
        return f"{self.run}/run.json"

    @property
    def progress(self) -> str:
        return f"{self.run}/progress.json"

    @property
    def counted(self) -> str:
        return f"{self.run}/counted.json.zst"

    @property
    def prices(self) -> str:
        return f"{self.run}/prices.json"

    @property
    def plan_log(self) -> str:
        return f"{self.run}/plan/log/"

    @property
    def commits(self) -> str:
        return f"{self.run}/commits/"

    @property
    def tokens(self) -> str:
        return f"{self.run}/tokens/{TOKENS_VERSION}/"

    def segment(self, number: int) -> str:
        return f"{self.plan_log}{number:06d}.json"

    def refusals(self, number: int, body_hash: str) -> str:
        return f"{self.plan_log}{number:06d}.{body_hash}.refused.jsonl.zst"

    @property
    def all_prompts(self) -> str:
        return f"{self.run}/plan/prompts/"

    def prompts(self, number: int, body_hash: str) -> str:
        return f"{self.all_prompts}{number:06d}.{body_hash}.jsonl.zst"

    def control(self, number: int) -> str:
        return f"{self.run}/control/{number:06d}.json"

    @property
    def canary(self) -> str:
        return f"{self.run}/canary.json"

    def serving(self, number: int) -> str:
        return f"{self.run}/serving/{number:06d}.json"

    @property
    def serving_now(self) -> str:
        return f"{self.run}/serving.json"

    @property
    def all_data(self) -> str:
        return f"{self.run}/data/"

    def data(self, segment: int, batch: str, attempt: str) -> str:
        return f"{self.run}/data/{segment:06d}/{batch}/{attempt}.jsonl.zst"

    def commit(self, segment: int, batch: str) -> str:
        return f"{self.commits}{segment:06d}/{batch}.json"

    def shard(self, segment: int, batch: str) -> str:
        return f"{self.tokens}{segment:06d}/{batch}.arrow"

    def quarantine(self, segment: int, batch: str) -> str:
        return f"{self.tokens}quarantine/{segment:06d}/{batch}.json"

    @property
    def all_compact(self) -> str:
        return f"{self.tokens}compact/"

    def compact(self, attempt: str) -> str:
        return f"{self.all_compact}{attempt}.arrow"

    def compact_index(self, number: int) -> str:
        return f"{self.all_compact}{number:06d}.json"

    def probe(self, name: str) -> str:
        return f"{self.run}/probe/{name}"

    def train(self, name: str) -> str:
        return f"{self.run}/train/{name}/"

    def order_entry(self, name: str, number: int) -> str:
        return f"{self.train(name)}order/{number:06d}.json"


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """Redis keys below `prefix`."""

    prefix: str = "dflash:"

    def pending(self, run: str) -> str:
        return f"{self.prefix}pending:{run}"

    def inflight(self, run: str) -> str:
        return f"{self.prefix}inflight:{run}"

    def lease(self, run: str, name: str) -> str:
        return f"{self.prefix}lease:{run}:{name}"

    def journal(self, run: str, name: str) -> str:
        return f"{self.prefix}journal:{run}:{name}"

    def suspects(self, run: str, name: str) -> str:
        return f"{self.prefix}suspects:{run}:{name}"

    def progress(self, run: str) -> str:
        return f"{self.prefix}progress:{run}"

    @property
    def events(self) -> str:
        return f"{self.prefix}events"

    @property
    def roll(self) -> str:
        return f"{self.prefix}roll"

    @property
    def observer(self) -> str:
        return f"{self.prefix}observer"

    @property
    def tokenizers(self) -> str:
        return f"{self.prefix}tokenizers"

    def sweep(self, run: str) -> str:
        return f"{self.prefix}sweep:{run}"

    def worker(self, slot: str) -> str:
        return f"{self.prefix}worker:{slot}"

    def serves(self, slot: str) -> str:
        return f"{self.prefix}serves:{slot}"

    def turn(self, run: str) -> str:
        return f"{self.prefix}turn:{run}"

    def promoter(self, run: str) -> str:
        return f"{self.prefix}promoter:{run}"

    def dead(self, reason: str) -> str:
        return f"{self.prefix}dead:{reason}"


def batch_name(segment: int, batch: str) -> str:
    """The name of a batch inside Redis: "<segment>/<batch>"."""
    return f"{segment}/{batch}"


def parse_batch_name(name: str) -> tuple[int, str]:
    """Inverse of batch_name."""
    segment, _, batch = name.partition("/")
    return int(segment), batch
