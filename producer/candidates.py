"""Items -> candidates: what may be planned, under which id, how often; or why it may not.

Takes items from <- sources/, normal forms from schemas.py and conversations.py; hands outcomes to
-> plan.py, by way of crew.py. The same row always gives the same keys and digests, whatever its
file, its metadata or the order of its keys; all draws are by hash of the row's id, so that no row
needs another. A line that the plan had under the very same rules is known by its digest and is not
parsed again: this is what makes planning a file for the second time fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from reprlib import repr as short
from typing import Any, NamedTuple

import orjson

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json, Prompt, Refusal
from producer.conversations import turns_of
from producer.known import NO_LINES, KnownLines
from producer.limits import Gate
from producer.rules import LineHash, Rules
from producer.schemas import Conversation, conversation_of, read_conversation
from producer.sources.inputs import Lines, SourcedItem, check_exact, is_shallow, parse_line

ID_KEYS = ("id", "custom_id", "uuid")
EXCERPT_CHARS = 200

_DRAWS = 1 << 64  # outcomes of a draw, which is 8 bytes of a hash
_EXACT = 2**53  # below it a float is the whole number that it seems
_TRUTHS = {"true": True, "false": False, "": None}


class Candidate(NamedTuple):
    """A prompt that may be planned. A tuple, because a million frozen records take seconds."""

    key: str  # 32 hex digits
    content_digest: str  # 32 hex digits, over turns, tools and sampling overrides
    line_digest: str  # 32 hex digits; "": came as no line, or its line tells not all of it
    heldout: bool
    sample: int  # 0: the row's first
    source: str
    line: bytes  # the Prompt as JSON, without "\n"
    row_key: str = ""  # key of the row's first sample; of no other
    schema: str = ""  # that its row was read by

    def refused(self, reason: str, detail: str) -> Refusal:
        """This prompt's refusal."""
        # Of what it asks alone: the rest depends on the call, and the same refusal comes once.
        turns = orjson.dumps(orjson.loads(self.line)["turns"]).decode()
        return Refusal(self.source, reason, detail, turns[:EXCERPT_CHARS])


class Known(NamedTuple):
    """Lines, one behind the other, that the plan had under the very same rules."""

    num_rows: int = 1


class NotDrawn(NamedTuple):
    """A row that its file's weight left out."""

    source: str


Outcome = Candidate | Refusal | Known | NotDrawn


def candidate_of(prompt: Prompt, content_digest: str) -> Candidate:
    """A planned prompt as a candidate again: for a retry, with the digest that its plan lists."""
    return Candidate(
        key=prompt.key,
        content_digest=content_digest,
        line_digest="",
        heldout=prompt.heldout,
        sample=0,
        source=prompt.source,
        line=_line(prompt),
    )


class RowReader:
    """Rules, made ready for a million rows; remembers ids only where duplicates are renamed."""

    def __init__(self, rules: Rules, known_lines: KnownLines = NO_LINES) -> None:
        self._shape, self._multi_turn, self._draws = rules.shape, rules.multi_turn, rules.draws
        self._gate = Gate(rules.limits)
        self._heldout_bound = rules.draws.heldout_share * _DRAWS
        self._seen_ids: set[bytes] | None = set() if rules.duplicates == "suffix" else None
        self._line_hash = LineHash(rules)
        self._known_lines = known_lines if self._line_hash.is_used else NO_LINES

    def read(self, items: Iterable[SourcedItem]) -> Iterator[Outcome]:
        """The outcomes of each item, in order: one, or one candidate per sample."""
        for source, item in items:
            if not isinstance(item, bytes):
                yield from self._outcomes_of(source, item)
                continue
            (digest,) = self._line_hash.digests([item], source)
            if digest in self._known_lines:
                yield Known()
            else:
                yield from self._outcomes_of(source, parse_line(item, source), item, digest)

    def read_lines(self, lines: Lines) -> Iterator[Outcome]:
        """The same for many lines; known ones behind each other are one outcome."""
        texts = lines.texts()
        digests = self._line_hash.digests(texts, lines.source(lines.first))
        are_known = self._known_lines.which(digests)
        num_known = 0
        for at, (text, is_known) in enumerate(zip(texts, are_known, strict=True)):
            if not text:
                continue
            if is_known:
                num_known += 1
                continue
            if num_known:
                yield Known(num_known)
                num_known = 0
            source = lines.source(lines.first + at)
            yield from self._outcomes_of(source, parse_line(text, source), text, digests[at])
        if num_known:
            yield Known(num_known)

    def _outcomes_of(
        self, source: str, row: Json | Refusal, line: bytes = b"", digest: bytes = b""
    ) -> list[Outcome]:
        """Of a row; with its line, where it came as one."""
        if isinstance(row, Refusal):
            return [row]
        try:
            return self._planned(self._conversation(row, line), source, digest.hex())
        except PromptRejected as error:
            return [Refusal(source, error.reason, error.detail, _excerpt(row))]

    def _conversation(self, row: Json, line: bytes) -> Conversation:
        """Of a row that can be written again as it is. Raises PromptRejected."""
        if not line:
            return read_conversation(row, self._shape)
        read = conversation_of if is_shallow(row, line) else read_conversation
        conversation = read(row, self._shape)
        rest = conversation.rest
        is_bare = len(conversation.messages) == 1 and len(rest) == ("id" in rest)
        if not is_bare or conversation.tools:  # else it holds no number but its id
            _check_exact(row, line)
        return conversation

    def _planned(self, conversation: Conversation, source: str, line_digest: str) -> list[Outcome]:
        """A candidate per sample, or that none was drawn. Raises PromptRejected."""
        turns = turns_of(conversation.messages, self._multi_turn)
        self._gate.check(turns, conversation.tools, conversation.sampling)
        tools, overrides, rest = conversation.tools, conversation.sampling, conversation.rest
        # Records take three times as long to write as the same facts in a dict.
        written = [{"messages": t.messages, "tool_results": t.tool_results} for t in turns]
        content_digest = self._content_digest(written, tools, overrides)
        row_id = _pop_id(rest) or content_digest
        if self._seen_ids is not None:
            row_id = _renamed(row_id, self._seen_ids)
        id_hash = hashlib.sha256(row_id.encode()).digest()
        key = id_hash[:16].hex()
        heldout = int.from_bytes(id_hash[16:24]) < self._heldout_bound
        if "heldout" in rest:
            heldout = _wanted_heldout(rest, heldout)
        prompt: Json = {
            "key": key,
            "id": row_id,
            "turns": written,
            "tools": tools,
            "heldout": heldout,
            "source": source,
            "sampling": overrides,
            "metadata": rest,
        }
        line = _line(prompt)
        facts = (key, content_digest, line_digest, heldout, 0, source, line, key)
        drawn = tuple.__new__(Candidate, (*facts, conversation.schema))  # a third of the time
        if self._draws.samples == 1 and not self._draws.weights:
            return [drawn]
        return _sampled(drawn, prompt, self._num_samples(source, id_hash))

    def _content_digest(self, turns: list[Json], tools: list[Json], overrides: Json) -> str:
        """Of what the target is asked. Raises PromptRejected where it may not be asked that."""
        content: Json = {"turns": turns, "tools": tools}
        if overrides:
            content["sampling"] = overrides
        body = _dumped(content, orjson.OPT_SORT_KEYS)
        self._gate.check_text(body)
        return hashlib.sha256(body).hexdigest()[:32]

    def _num_samples(self, source: str, id_hash: bytes) -> int:
        """The expected number of samples, its fraction drawn."""
        expected = self._draws.weight_of(source) * self._draws.samples
        whole = int(expected)
        return whole + (int.from_bytes(id_hash[24:32]) < (expected - whole) * _DRAWS)


def _wanted_heldout(rest: Json, drawn: bool) -> bool:
    """What a row says itself, taken out of it; what was drawn where it says nothing."""
    wanted = rest.pop("heldout")
    if isinstance(wanted, str):  # a table of texts has no other way to say it
        wanted = _TRUTHS.get(wanted.strip().lower(), wanted)
    if wanted is None:
        return drawn
    if isinstance(wanted, bool):
        return wanted
    raise PromptRejected("bad_heldout", f"`heldout` must be true or false: {short(wanted)}")


def _sampled(first: Candidate, prompt: Json, num_samples: int) -> list[Outcome]:
    """As many of a row's samples as were drawn. The last one vouches for the row's line:
    where it is planned, all of them are."""
    if num_samples == 0:
        return [NotDrawn(first.source)]
    if num_samples == 1:
        return [first]
    samples = [first._replace(line_digest="")]
    for sample in range(1, num_samples):
        sample_id = f"{prompt['id']}#{sample}"
        # Not the hash of that id, which may well be a row's own.
        key = hashlib.sha256(f"{first.key} sample {sample}".encode()).hexdigest()[:32]
        line = _line({**prompt, "key": key, "id": sample_id})
        samples.append(samples[0]._replace(key=key, sample=sample, line=line))
    samples[-1] = samples[-1]._replace(line_digest=first.line_digest)
    return [*samples]


def _renamed(row_id: str, seen: set[bytes]) -> str:
    """The id, or "<id>~n" for its n-th row in this call; remembered as seen.

    No sample has such an id, because those end in "#k"; a row's own "<id>~n" counts as seen.
    """
    name, occurrence = row_id, 1
    while (mark := hashlib.sha256(name.encode()).digest()[:16]) in seen:
        occurrence += 1
        name = f"{row_id}~{occurrence}"
    seen.add(mark)
    return name


def _check_exact(row: Json, line: bytes) -> None:
    try:
        check_exact(row, line)
    except ValueError as error:
        raise PromptRejected("unsupported_value", str(error)) from error


def _pop_id(rest: Json) -> str:
    """The first id that a row has, as text; empty where it has none."""
    if (value := rest.get("id")).__class__ is str and value:  # nearly every row
        return str(rest.pop("id"))
    for name in ID_KEYS:
        value = rest.get(name)
        if value is None or value == "":
            continue
        if value.__class__ is float and abs(value) < _EXACT and value.is_integer():
            value = int(value)  # a column of numbers with gaps in it
        if value.__class__ not in (str, int):
            raise PromptRejected(
                "bad_id", f"`{name}` must be text or a whole number: {short(value)}"
            )
        del rest[name]
        return str(value)
    return ""


def _line(prompt: Json | Prompt) -> bytes:
    # A slice is a copy: orjson's own bytes keep the buffer of 5 KB that they were written into.
    return _dumped(prompt, orjson.OPT_APPEND_NEWLINE)[:-1]


def _dumped(value: Any, options: int = 0) -> bytes:
    try:
        return orjson.dumps(value, option=options)
    except TypeError as error:
        raise PromptRejected("malformed_json", f"too deeply nested: {error}") from error


def _excerpt(row: Json) -> str:
    try:
        return orjson.dumps(row).decode()[:EXCERPT_CHARS]
    except TypeError:
        return short(row)
