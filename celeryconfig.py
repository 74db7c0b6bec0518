"""The contract of the queue: names, priorities and delivery policy, for senders and workers alike.

The producer sends by name and never loads worker code. A message is a hint (run, segment, batch)
and never the only record of a batch: who works on what stands in Redis as claims, and what is done
stands in S3, so the settings here aim at small messages and no surprises, not at delivery
guarantees. The broker's URL is set by whoever makes the app, from its settings.
"""

GENERATE_TASK = "dflash.generate"
TOKENIZE_TASK = "dflash.tokenize"
TOKENIZE_QUEUE = "tokenize"  # of every run, whatever its target: no model is loaded for it
SWEEP_TASK = "dflash.sweep_tokens"  # in the same queue: look for commits whose hint was lost

# kombu keeps one Redis list per step; 0 is first in line AND the default, so ordinary batches name
# a later step and only work that was given back goes first.
PRIORITY_STEPS = (0, 3, 6, 9)
PRIORITY_GIVEN_BACK = 0
PRIORITIES = {"high": 3, "normal": 6, "low": 9}  # of a run against others of the same target
PRIORITY_ORDINARY = PRIORITIES["normal"]


def generate_queue(target_fingerprint: str) -> str:
    """Two targets on one Redis never share a queue."""
    return f"generate.{target_fingerprint[:12]}"


task_serializer = "json"  # ids alone: readable with redis-cli, by any version
accept_content = ["json"]  # nothing that comes out of Redis is ever unpickled

# Acked on receipt: claims by lease, not Celery's redelivery, bring a dead worker's batch back.
task_acks_late = False
# One message per free slot: a prefetched batch would wait behind a busy worker while others idle.
worker_prefetch_multiplier = 1
worker_disable_prefetch = True
worker_enable_prefetch_count_reduction = False  # after a reconnect: nothing is fetched ahead anyway

# A batch waits for an engine, which one event loop asks for all of them: threads cost nothing, and
# a pool of processes would fork the loop. Their number is set by the worker (see its worker.py).
worker_pool = "threads"

task_ignore_result = True  # the commit in S3 is the result
result_backend = None  # and Redis keeps none

broker_connection_retry_on_startup = True  # Redis may come up after its workers
broker_connection_max_retries = None  # and be away for as long as it likes
broker_transport_options = {
    "priority_steps": list(PRIORITY_STEPS),  # the lists of a queue; senders and readers must agree
    "queue_order_strategy": "priority",  # strictly first in line for what was given back
    "visibility_timeout": 6 * 3600,  # irrelevant with early acks, long so that it stays so
    "socket_timeout": 30,  # longer than a blocking read, shorter than a person's patience
    "socket_connect_timeout": 10,  # a host that is gone doesn't refuse, it says nothing
    "socket_keepalive": True,  # a NAT that forgot the connection is noticed
    "health_check_interval": 25,  # and one that idled is tried before it is used
    "retry_on_timeout": True,  # a hint sent twice does no harm, one not sent waits for reconcile
}

# It listens on a PubSub connection: cut, that is made anew inside a blocking read, which keeps the
# whole consumer from hearing anything. (So do gossip and mingle: start workers without them.)
worker_enable_remote_control = False

worker_send_task_events = True  # for Flower
event_queue_expires = 60  # seconds; without a Flower the events must not pile up
event_queue_ttl = 10  # seconds
worker_hijack_root_logger = False  # logs.py has set it up
