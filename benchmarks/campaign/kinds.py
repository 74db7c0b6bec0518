"""The kinds of faults that a campaign may meet, by the names that its file calls them.

Read by configuration.py and schedule.py; injections.py says how each is done, reasons.py what each
excuses.
"""

from __future__ import annotations

WORKER_KILLED = "worker_killed"
WORKER_TOLD = "worker_told_to_go"
ENGINE_KILLED = "engine_killed"
ENGINE_HANGS = "engine_hangs"  # until it is killed
ENGINE_500 = "engine_answers_500"
REDIS_RESTARTED = "redis_restarted"
REDIS_KILLED = "redis_killed"
REDIS_SILENT = "redis_silent"
REDIS_FLUSHED = "redis_flushed"
S3_503 = "s3_answers_503"
S3_LOST = "s3_replies_lost"
S3_RESET = "s3_connections_reset"
CLOCKS = "clocks_jitter"
ALL = (
    *(WORKER_KILLED, WORKER_TOLD, ENGINE_KILLED, ENGINE_HANGS, ENGINE_500),
    *(REDIS_RESTARTED, REDIS_KILLED, REDIS_SILENT, REDIS_FLUSHED),
    *(S3_503, S3_LOST, S3_RESET, CLOCKS),
)
WORKERS_GO = (WORKER_KILLED, WORKER_TOLD)
REDIS_AWAY = (REDIS_KILLED, REDIS_RESTARTED, REDIS_SILENT)
# What all workers lean on, or a clock that leases run by.
SHARED = (*REDIS_AWAY, REDIS_FLUSHED, S3_503, S3_LOST, S3_RESET, CLOCKS)
