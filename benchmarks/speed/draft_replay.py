"""How many tokens a step gives with drafts of each method: known conversations of agents, replayed token by token.

    python -m benchmarks.draft_replay [--recorded ../shared/clients/recorded] [--trajectories FOLDER] [--tokenizer FILE]

Drafts never change a token, so the tokens of a step follow from the conversation alone, without a model: the drafts that equal
the next tokens, and one more. Each answer of an assistant is one request, whose prompt is the conversation before it. The
requests come one after the other to one proposer, so later conversations find what earlier ones have said.

- Recorded: the requests of coding agents with their tools, at their real size. Their long texts were cut, and are filled with
  the words before the cut. The answers are those of a script, so they are short, and similar in all conversations. "First" are
  the conversations as they were recorded, "again" is the same list a second time.
- Trajectories: SWE-agent's files (`*.traj`), such as trajectories/demonstrations of its repository: answers of large models.

The tokenizer is a tokenizer.json; by default that of the embedded model, whose tokens are short. Times are of `propose` for one
request.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.shared.report import emit, print_table
from inflight.config.speculative import SpeculativeConfig, resolve_speculative
from inflight.interface.request import ResolvedSampling
from inflight.interface.step import NewRequestData
from inflight.sampling_params import SamplingParams
from inflight.spec_decode.make_proposer import PROPOSERS
from inflight.spec_decode.proposer import Proposer
from inflight.tokenizer.chat_template import ChatTemplate
from tests.clients.recorded_requests import FOLDER, recorded

EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "inflight" / "demo" / "model"
CUT = re.compile(r"([^\"]{0,40})…\[(\d+) chars\]")  # "the first words …[1234 chars]"
METHODS: dict[str, dict[str, Any]] = {  # Any: JSON
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix, own text only": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "ngram, 12 drafts": {"method": "ngram", "num_speculative_tokens": 12},
    "suffix, 12 drafts": {"method": "suffix", "num_speculative_tokens": 12},
}


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form, and arguments of `ChatTemplate.render`."""

    name: str
    messages: list[dict[str, Any]]  # Any: JSON
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    output: list[int]


@dataclass
class Count:
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_a_step(self) -> float:
        return self.num_tokens / self.num_steps


def filled(text: str) -> str:
    """`text` with each cut replaced by as many characters as were cut: the words before it, again and again."""

    def fill(cut: re.Match[str]) -> str:
        words = cut[1].strip() or "text"
        size = int(cut[2])
        return cut[1] + (f" {words}" * (size // (len(words) + 1) + 1))[:size]

    return CUT.sub(fill, text)


def fill_all(value: Any) -> Any:  # Any: JSON
    if isinstance(value, str):
        return filled(value)
    if isinstance(value, dict):
        return {key: fill_all(each) for key, each in value.items()}
    return [fill_all(each) for each in value] if isinstance(value, list) else value


def of_recordings(folder: Path) -> list[Conversation]:
    """The longest recorded request of each conversation."""
    longest: dict[str, Conversation] = {}
    for each in recorded(folder)[0]:
        name = re.sub(r"\.\d+\.json$", "", each.file)
        if len(each.messages) > len(longest[name].messages if name in longest else ()):
            longest[name] = Conversation(name, fill_all(each.messages), fill_all(each.options))
    return list(longest.values())


def of_trajectories(folder: Path) -> list[Conversation]:
    found = []
    for file in sorted(folder.rglob("*.traj")):
        messages = []
        for said in json.loads(file.read_text(encoding="utf-8"))["history"]:
            content = said.get("content") or ""
            if isinstance(content, list):
                content = "".join(part.get("text", "") for part in content)
            message = {"role": said["role"], "content": content}
            if said.get("tool_calls"):
                message["tool_calls"] = said["tool_calls"]
            messages.append(message)
        found.append(Conversation(file.stem, messages))
    return found


def answers_of(conversation: Conversation, template: ChatTemplate, tokenizer: Tokenizer) -> list[Answer]:
    found = []
    options = {**conversation.options, "continue_final_message": False}
    for i, message in enumerate(conversation.messages):
        if message["role"] == "assistant" and i:
            before, upto = conversation.messages[:i], conversation.messages[: i + 1]
            prompt = template.render(before, **{**options, "add_generation_prompt": True})
            whole = template.render(upto, **{**options, "add_generation_prompt": False})
            assert whole.startswith(prompt), f"{conversation.name}: the answer does not follow its prompt"
            texts = (prompt, whole[len(prompt) :])
            found.append(Answer(*(tokenizer.encode(text, add_special_tokens=False).ids for text in texts)))
    return found


def replay(proposer: Proposer, answers: Iterable[Answer], longest: int) -> Count:
    count = Count()
    token_ids = np.zeros((1, longest + 64), dtype=np.int32)
    slots = np.zeros(1, dtype=np.int32)
    for number, answer in enumerate(answers):
        whole = answer.prompt + answer.output
        token_ids[0, : len(whole)] = whole
        data = NewRequestData(
            request_id=str(number),
            slot=0,
            token_ids=np.array(answer.prompt, dtype=np.int32),
            num_prompt_tokens=len(answer.prompt),
            block_ids=(),
            sampling=ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=1),
        )
        proposer.begin([data])
        known = len(answer.prompt) + 1  # the prompt's step has drawn the first token
        count.num_steps += 1
        while known < len(whole):
            start = time.perf_counter()
            drafts = proposer.propose(token_ids, slots, np.array([known], dtype=np.int32))[0].tolist()
            count.seconds.append(time.perf_counter() - start)
            drafts = [token for token in drafts if token >= 0]
            num_right = 0
            while (
                num_right < len(drafts)
                and known + num_right < len(whole)
                and drafts[num_right] == whole[known + num_right]
            ):
                num_right += 1
            count.num_drafts += len(drafts)
            count.num_accepted += num_right
            count.num_steps += 1
            known += num_right + 1
        count.num_tokens += len(answer.output)
    return count


def compare(
    name: str, parts: Sequence[tuple[str, list[Answer]]], methods: dict[str, SpeculativeConfig]
) -> list[list[object]]:
    """Rows of the table: each method, for each of the parts, which one proposer gets one after the other."""
    longest = max(len(answer.prompt) + len(answer.output) for _, answers in parts for answer in answers)
    rows: list[list[object]] = []
    for method, config in methods.items():
        proposer = PROPOSERS[config.method](config, "cpu")
        for part, answers in parts:
            count = replay(proposer, answers, longest)
            acceptance = count.num_accepted / max(count.num_drafts, 1)
            milliseconds = statistics.median(count.seconds) * 1e3
            emit(benchmark="draft_replay", texts=name, part=part, method=method, tokens=count.num_tokens,
                 tokens_a_step=round(count.tokens_a_step, 3), drafts=count.num_drafts, acceptance=round(acceptance, 3),
                 propose_ms=round(milliseconds, 3), longest_prompt=longest,
            )  # fmt: skip
            rows.append([f"{name}, {part}", method, count.num_tokens, f"{count.tokens_a_step:.2f}", f"{acceptance:.0%}",
                         f"{milliseconds:.2f}"])  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, default=FOLDER, help="folder with recorded requests [%(default)s]")
    parser.add_argument("--trajectories", type=Path, help="folder with files *.traj; without it they are left out")
    parser.add_argument("--tokenizer", type=Path, default=EMBEDDED_MODEL / "tokenizer.json", help="[%(default)s]")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    template = ChatTemplate.from_folder(EMBEDDED_MODEL)
    methods = {name: resolve_speculative(given) for name, given in METHODS.items()}
    configs = {name: config for name, config in methods.items() if config is not None}
    first = [answer for each in of_recordings(options.recorded) for answer in answers_of(each, template, tokenizer)]
    rows = compare("recorded", (("first", first), ("again", first)), configs)
    if options.trajectories is not None:
        real = [
            answer for each in of_trajectories(options.trajectories) for answer in answers_of(each, template, tokenizer)
        ]
        rows += compare("trajectories", (("first", real),), configs)
    print_table(["conversations", "method", "tokens", "tokens a step", "drafts accepted", "propose, ms"], rows)


if __name__ == "__main__":
    main()
