"""Plan prompts out of Python, wait for the fleet, read its answers.

    DFLASH_MODEL=/models/qwen3 python examples/enqueue_from_python.py

Redis and S3 are found as by the command: DFLASH_* variables or dflash.toml. A worker must be
running (`dflash-fleet worker`). Run it twice: the second time plans and generates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import load_settings
from producer.api import Run, RunOptions


def questions() -> Iterator[Json]:
    """A generator may give millions: rows are planned as they come."""
    yield {"id": "sky", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    # Each of these is answered on the history that the target itself has made.
    yield {"id": "primes", "user_turns": ["Name three primes.", "And the next one?"]}
    for number in range(10):
        yield {"id": f"square-{number}", "question": f"What is {number} squared?"}


def main() -> None:
    """Enqueue, wait, print."""
    settings = load_settings({"run": "from-python"})
    with Run.create(settings, settings.model, RunOptions(max_new_tokens=256)) as run:
        print(run.enqueue(questions()))
        run.seal()
        if not run.wait(timeout_s=600):
            raise SystemExit(f"not done yet: {run.progress()}")
        for row in run.results():
            print(row.id, row.messages[-1]["content"])


if __name__ == "__main__":
    main()
