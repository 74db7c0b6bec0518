"""SGLang's words: what is asked, and how replies that were seen on 0.5.17 read."""

from __future__ import annotations

import pytest

from dflash_workers.contract.records import Json, Sampling
from dflash_workers.dialects.sglang import Sglang
from dflash_workers.questions import Question
from dflash_workers.replies import Reply

QUESTION = Question([5, 6, 7], 11, Sampling(0.7, 0.95, 20, 64, [2]), 512)
SEEN: Json = {
    "text": "r\n\n#",
    "output_ids": [98, 198, 198, 19, 2],
    "meta_info": {
        "id": "aaaa",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "weight_version": "default",
        "completion_tokens": 5,
        "cached_tokens": 2,
        "cached_tokens_details": None,
        "e2e_latency": 3.5,
    },
}


def seen(**meta: object) -> Json:
    return SEEN | {"meta_info": SEEN["meta_info"] | meta}


def test_a_question_says_every_value_and_nothing_that_it_does_not_know() -> None:
    asked = Sglang().ask(QUESTION, "r1", 0, {})

    assert asked == {
        "rid": "r1",
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.95,
            "top_k": 20,
            "max_new_tokens": 64,
            "stop_token_ids": [2],
            "sampling_seed": 11,
        },
    }


def test_a_stream_comes_in_few_events() -> None:
    asked = Sglang().ask(QUESTION, "r1", 256, {})

    assert asked["stream"] is True
    assert asked["sampling_params"]["stream_interval"] == 256


def test_a_reply_is_read() -> None:
    assert Sglang().read(SEEN) == Reply(
        output_ids=[98, 198, 198, 19, 2],
        text="r\n\n#",
        finish="stop",
        num_input=3,
        num_output=5,
        matched=2,
        cached_tokens=2,
    )


def test_an_event_in_mid_answer_has_no_end() -> None:
    assert Sglang().read(seen(finish_reason=None)).finish is None


def test_an_abort_says_whose_it_was() -> None:
    ended = {"type": "abort", "message": "queue is full", "status_code": 503, "err_type": None}

    reply = Sglang().read(seen(finish_reason=ended))

    assert (reply.finish, reply.status, reply.detail) == ("abort", 503, "queue is full")


def test_speculation_statistics_are_kept_by_their_name() -> None:
    found = {"spec_accept_length": 3.5, "spec_verify_ct": 12}

    assert Sglang().read(seen(**found)).spec == found


@pytest.mark.parametrize("body", [{}, {"output_ids": [1]}, SEEN | {"output_ids": None}])
def test_what_is_no_reply_is_not_read(body: Json) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Sglang().read(body)


def test_facts_are_those_that_decide_the_output() -> None:
    info = {"version": "0.5.17", "dtype": "bfloat16", "quantization": None, "port": 30000}

    assert Sglang().read_facts(info) == {"version": "0.5.17", "dtype": "bfloat16"}


def test_log_probabilities_leave_the_first_id_out() -> None:
    asked = Sglang().ask_log_probs([1, 4093, 198])
    found = [[None, 1, None], [-13.95, 4093, None], [-3.3, 198, None]]

    assert asked is not None
    assert (asked["return_logprob"], asked["logprob_start_len"]) == (True, 0)
    assert Sglang().read_log_probs(seen(input_token_logprobs=found)) == [-13.95, -3.3]
