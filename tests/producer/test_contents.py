from __future__ import annotations

import hashlib

from producer.contents import Contents, content_of


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def test_what_the_log_lists_and_what_is_added_later_are_one_dict() -> None:
    contents = Contents()
    keys, asked = [digest(f"key {n}") for n in range(100)], [digest(f"{n}") for n in range(100)]
    contents.add(keys[:40], asked[:40])
    contents.add(keys[40:80], asked[40:80])
    known = contents.by_key()
    known[int(keys[80], 16)] = content_of(asked[80])
    contents.add(keys[81:], asked[81:])

    assert contents.by_key() is known
    assert known == {
        int(key, 16): int(content, 16) >> 68 for key, content in zip(keys, asked, strict=True)
    }


def test_the_least_and_the_greatest_key_keep_their_zeros() -> None:
    contents = Contents()
    contents.add(["00" * 16, "ff" * 16, "0" * 31 + "1"], ["00" * 16, "ff" * 16, "f" + "0" * 31])

    assert contents.by_key() == {0: 0, (1 << 128) - 1: (1 << 60) - 1, 1: 15 << 56}
