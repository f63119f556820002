"""Parameters of requests that other libraries have under another name, or that Inflight does not have: what to give instead."""

_CONSTRAINT = (
    "give structured_outputs=StructuredOutputsParams(...), which takes json, regex, choice, grammar or structural_tag"
)
_BEAMS = "there is no beam search: use n, and rank the completions by cumulative_logprob"

FOREIGN_SAMPLING = {
    # vLLM
    "guided_decoding": _CONSTRAINT,
    "guided_json": _CONSTRAINT,
    "guided_regex": _CONSTRAINT,
    "guided_choice": _CONSTRAINT,
    "guided_grammar": _CONSTRAINT,
    "best_of": "give n, and rank the completions by cumulative_logprob",
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "logits_processors": "no code of a request runs: use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "truncate_prompt_tokens": "cut the prompt: give its last token ids as the prompt",
    "spaces_between_special_tokens": "leave it out: texts are decoded as the model's tokenizer joins tokens",
    "output_kind": "leave it out: `LLM` returns whole outputs, and `AsyncLLM.generate` has the argument `kind`",
    "extra_args": "leave it out: there is no part of the engine that reads further arguments",
    "flat_logprobs": "leave it out: log-probabilities are dictionaries, one for each token",
    # the OpenAI API
    "response_format": _CONSTRAINT,
    "max_completion_tokens": "give max_tokens",
    "top_logprobs": "give logprobs, the number of most probable tokens",
    "tools": "it is an argument of `LLM.chat`",
    # transformers
    "max_new_tokens": "give max_tokens",
    "min_new_tokens": "give min_tokens",
    "max_length": "give max_tokens, which does not count the prompt",
    "do_sample": "temperature=0 is greedy; any other temperature draws",
    "num_return_sequences": "give n",
    "num_beams": _BEAMS,
    "stop_strings": "give stop",
    "stop_sequences": "give stop",
    "eos_token_id": "give stop_token_ids",
    "bad_words_ids": "give bad_words, which are texts",
    "no_repeat_ngram_size": "give frequency_penalty or repetition_penalty",
    # llama.cpp and Ollama
    "repeat_penalty": "give repetition_penalty",
    "num_predict": "give max_tokens",
    "n_predict": "give max_tokens",
    "typical_p": "give top_p or min_p",
}

FOREIGN_CONSTRAINTS = {
    "guided_json": "give json",
    "guided_regex": "give regex",
    "guided_choice": "give choice",
    "guided_grammar": "give grammar",
    "json_schema": "give json, a schema or a pydantic class",
    "schema": "give json, a schema or a pydantic class",
    "response_format": "give json, a schema or a pydantic class",
    "pattern": "give regex",
    "choices": "give choice",
    "ebnf": "give grammar, in Lark's notation or llama.cpp's GBNF",
    "backend": "leave it out: llguidance enforces all constraints",
    "disable_fallback": "leave it out: llguidance enforces all constraints",
    "disable_additional_properties": 'leave it out, and write "additionalProperties": false into the schema',
}
