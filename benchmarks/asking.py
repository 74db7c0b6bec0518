"""One prompt, asked of a server through SGLang's /generate.

Used by the programs beside this file that need replies and no fleet.
"""

from __future__ import annotations

import urllib.request

import orjson

from dflash_workers.contract.records import Json

TIMEOUT_S = 120


def ask(url: str, prompt: list[int], sampling: Json) -> Json:
    """The server's reply: `output_ids` and `meta_info`."""
    body = orjson.dumps({"input_ids": prompt, "sampling_params": sampling})
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return dict(orjson.loads(reply.read()))
