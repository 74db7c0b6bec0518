"""Says by its exit code whether a URL of this container answers: `healthy.py URL`.

The images' health check; the standard library alone, so that asking every half minute costs little.
A status of 401 is an answer: somebody is there and wants a password.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 5
ALIVE = (200, 401)


def status_of(url: str) -> int:
    """The HTTP status; 0 where nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(status_of(sys.argv[1]) not in ALIVE)
