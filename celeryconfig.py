"""The contract of the queue: names, priorities and delivery policy, for senders and workers alike.

The producer sends by name and never loads worker code. A message is a hint (run, segment, batch)
and never the only record of a batch: who works on what stands in Redis as claims, and what is done
stands in S3, so the settings here aim at small messages and no surprises, not at delivery
guarantees. The broker's URL is set by whoever makes the app, from its settings.
"""

GENERATE_TASK = "dflash.generate"
TOKENIZE_TASK = "dflash.tokenize"
TOKENIZE_QUEUE = "tokenize"

# kombu keeps one Redis list per step; 0 is first in line AND the default, so ordinary batches name
# a later step and only work that was given back goes first.
PRIORITY_STEPS = (0, 3, 6, 9)
PRIORITY_GIVEN_BACK = 0
PRIORITY_ORDINARY = 6


def generate_queue(target_fingerprint: str) -> str:
    """Two targets on one Redis never share a queue."""
    return f"generate.{target_fingerprint[:12]}"


task_serializer = "json"
accept_content = ["json"]  # nothing pickled ever crosses a process boundary

# Acked on receipt: claims by lease, not Celery's redelivery, bring a dead worker's batch back.
task_acks_late = False
# One message per free slot: a prefetched batch would wait behind a busy worker while others idle.
worker_prefetch_multiplier = 1
worker_disable_prefetch = True

task_ignore_result = True  # the commit in S3 is the result
result_backend = None

broker_connection_retry_on_startup = True
broker_connection_max_retries = None  # Redis may be away for as long as it likes
broker_transport_options = {
    "priority_steps": list(PRIORITY_STEPS),
    "queue_order_strategy": "priority",  # strictly first in line for what was given back
    "visibility_timeout": 6 * 3600,  # irrelevant with early acks, long so that it stays so
    "socket_timeout": 30,
    "socket_connect_timeout": 10,
    "socket_keepalive": True,
    "health_check_interval": 25,
    "retry_on_timeout": True,
}

worker_send_task_events = True  # for Flower
event_queue_expires = 60  # seconds; without a Flower the events must not pile up
event_queue_ttl = 10  # seconds
worker_hijack_root_logger = False
