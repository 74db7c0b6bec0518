"""SGLang without a model: real HTTP servers whose pace, answers and faults are given.

    python -m benchmarks.simulated --model FOLDER --ports 31001,31002 [flags]

Asked by real workers and by `dflash-fleet bench`; driven by the programs beside it. Any number of
engines in one process, one event loop; each is alone with its port, its requests and its faults.

Flags, all but the first two optional, of all engines alike:
  --model FOLDER            its tokenizer.json is read
  --port N | --ports N,N    on 127.0.0.1
  --preset NAME             a measured engine of presets.py; flags below it change it
  --step-ms, --per-request-ms, --knee, --collapse    of one decode step, by the number running
  --prefill-tokens-per-s, --prefill-base-ms, --chunk-tokens    0 tokens per s: prefill is free
  --max-running N, --kv-tokens N    requests, tokens at once; 0: no limit of tokens
  --drafter FOLDER          simulated.json: accept_length, step_cost, step_cost_per_request
  --time-factor X           everything is X times as fast
  --mean-tokens, --variation, --tail-share, --longest    of answers, in ids, the stop id included
  --served-model NAME, --weights TEXT    other weights, other log-probabilities
  --token-log FILE          appended to by all of them

Endpoints: SGLang's POST /generate (ids; streamed at `stream_interval`, the whole output in every
event; `return_logprob`; `ignore_eos`), /abort_request ({"rid"} or {"abort_all"}), /flush_cache; GET
/health, /health_generate, /server_info, /model_info, /v1/models, /v1/loads, /metrics. Its own:
  GET  /occupancy   at_s, first_s (monotonic), num_running, num_waiting, kv_tokens, and since its
                    start slot_seconds, num_tokens, num_finished, num_input, num_retracted
  GET  /running     {"running": {rid: tokens so far of the whole answer}, "num_asked": N}
  POST /simulate    {"mode": "ok" | "500" | "hang" | "unhealthy"}; 500: of /generate; hang: nothing
                    gains a token, all else answers; {"mode": "dead", "for_s": 3.0}: connections are
                    cut, the port refuses, all requests are lost; then it is back, empty,
                    and counts anew

Answers are a function of the question: `Answers(folder, lengths).answer_of(input_ids)` of
answers.py gives the whole one, the stop id last, whatever of it stands in the ids already.

The token log holds JSON lines; times are seconds since the epoch, places count from the answer's
first token. A request's begin, then its end; one without an end was in flight when the process
was killed:
  {"engine": "31001", "rid", "question": 16 hex digits, "num_given", "started_s"}
  {"engine", "rid", "question", "num_given", "started_s", "first_s": null where it got no token,
   "moved_s": its last token, "end": place that it got to, "outcome": stop|length|abort|left|died}
  {"engine", "mode", "at_s"}
"""
