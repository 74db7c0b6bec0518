"""Every number that Prometheus may be told, in one place: name, kind, labels, meaning.

Exposed by the worker, the tokenizer, the trainer (each its own) and the exporter (the fleet's, from
S3 and Redis); asked for by deploy/prometheus and deploy/grafana, whose every query a test holds to
this table. A name is `dflash_<side>_<what>_<unit>`, a counter's ends in `_total`. Labels are
bounded: runs that were asked for, reasons of a known list, slots; never prompts, batches or hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

GAUGE, COUNTER = "gauge", "counter"


@dataclass(frozen=True, slots=True)
class Metric:
    """One name."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def side(self) -> str:
        """Who exposes it: fleet | worker | tokenizer | trainer."""
        return self.name.split("_")[1]


def _fleet(what: str, meaning: str, *labels: str, kind: str = GAUGE) -> Metric:
    return Metric(f"dflash_fleet_{what}", kind, meaning, ("run", *labels))


def _of(side: str, what: str, kind: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"dflash_{side}_{what}", kind, meaning, labels)


FLEET = (
    _fleet("planned_prompts", "Prompts in the plan."),
    _fleet("completed_prompts", "Prompts with an answer in S3."),
    _fleet("failed_prompts", "Prompts rejected, and not planned again since."),
    _fleet("rejections", "Rejections in commits, of prompts planned again too.", "reason"),
    _fleet("input_tokens", "Tokens asked, in commits."),
    _fleet("output_tokens", "Tokens answered, in commits."),
    _fleet("made_again_tokens", "Tokens that were generated and thrown away, in commits."),
    _fleet("committed_batches", "Batches with a commit."),
    _fleet("committed_bytes", "Bytes of data objects that commits name."),
    _fleet("rate_prompts_per_second", "Prompts that end, over the last ten minutes."),
    _fleet("eta_seconds", "Until nothing is left.", "bound"),  # low | likely | high
    _fleet("state", "1 for the run's present state.", "state"),
    _fleet("queued_messages", "Hints waiting in the queue of the run's target."),
    _fleet("pending_batches", "Batches that wait for a worker."),
    _fleet("inflight_batches", "Batches that a worker holds, or held when it died."),
    _fleet("workers", "Workers that said within 15 s that they live.", "state"),
    _fleet("in_flight_requests", "Requests running in all engines."),
    _fleet("limit_requests", "The most that may run in all engines."),
    _fleet("tokens_per_second", "Output tokens of all workers."),
    _fleet("kv_use_ratio", "Of the fullest engine's KV cache."),
    _fleet("accept_length", "Mean over engines that speculate, as they tell it."),
    _fleet("untokenized_batches", "Commits without a shard."),
    _fleet("quarantined_batches", "Commits that no shard can be made of."),
    _fleet("trainer_lag_shards", "Shards that a trainer's order does not name yet.", "name"),
    _fleet("gpu_hours", "Time that workers' GPUs had a batch."),
    _fleet("cost_usd", "These hours at the prices stored with the run.", "gpu"),
    _fleet("dead_letters", "Messages kept because nobody can work on them.", "reason"),
    _fleet("up", "1 where the dependency answered at the last look.", "dependency"),
    _fleet("measured_timestamp_seconds", "When these numbers were last measured."),
)

WORKER = (
    _of("worker", "state", GAUGE, "1 for the present state.", "slot", "state"),
    _of("worker", "in_flight_requests", GAUGE, "Requests in the engine.", "slot"),
    _of("worker", "limit_requests", GAUGE, "The most that may be in it.", "slot"),
    _of("worker", "held_batches", GAUGE, "Batches claimed.", "slot"),
    _of("worker", "busy_slots", GAUGE, "Messages worked on.", "slot"),
    _of("worker", "output_tokens_total", COUNTER, "Tokens that the engine gave.", "slot"),
    _of("worker", "replies_total", COUNTER, "Replies of the engine, refusals too.", "slot"),
    _of("worker", "engine_deaths_total", COUNTER, "Deaths of the engine seen.", "slot"),
    _of("worker", "messages_total", COUNTER, "Messages by what they were.", "slot", "kind"),
    _of("worker", "kv_use_ratio", GAUGE, "Of the engine's KV cache.", "slot"),
    _of("worker", "accept_length", GAUGE, "Of the engine's drafts, as it tells it.", "slot"),
)

TOKENIZER = (
    _of("tokenizer", "shards_total", COUNTER, "Shards made."),
    _of("tokenizer", "samples_total", COUNTER, "Samples in them."),
    _of("tokenizer", "tokens_total", COUNTER, "Tokens in them."),
    _of("tokenizer", "quarantined_total", COUNTER, "Commits put into quarantine."),
    _of("tokenizer", "failures_total", COUNTER, "Hints given up, which a sweep brings back."),
)

TRAINER = (
    _of("trainer", "step", GAUGE, "Steps done."),
    _of("trainer", "loss", GAUGE, "Of the last step."),
    _of("trainer", "accept_length", GAUGE, "Expected tokens a verify step, of the last step."),
    _of("trainer", "measured_accept_length", GAUGE, "Tokens a verify step on held-out answers."),
    _of("trainer", "draft_accuracy", GAUGE, "Of the last step, by place in the block.", "place"),
    _of("trainer", "tokens_per_second", GAUGE, "Trained on in the last step."),
    _of("trainer", "mfu", GAUGE, "Share of the chips' peak."),
    _of("trainer", "phase_seconds", GAUGE, "Of the last step, by phase.", "phase"),
    _of("trainer", "tokens_total", COUNTER, "Tokens trained on."),
    _of("trainer", "starved_seconds_total", COUNTER, "Time that steps waited for shards."),
)

METRICS: dict[str, Metric] = {m.name: m for m in (*FLEET, *WORKER, *TOKENIZER, *TRAINER)}
