"""The tags around the reasoning, by the names of the reasoning parsers. Most names are vLLM's."""

from collections.abc import Mapping

from inflight.parsers.harmony import FRAME, HarmonyParser
from inflight.parsers.reasoning import ReasoningMarkup

_THINK = ReasoningMarkup("<think>", "</think>")
_NAMES_OF_THINK = (
    "qwen3 deepseek_v3 deepseek_v31 deepseek_v4 glm45 glm47 holo2 kimi_k2 mimo minimax_m2 minimax_m2_append_think nemotron_v3 "
    "olmo3 poolside_v1 step3 step3p5"
).split()

# In a chat template they are looked for in this order. Of several names with the same tags, the first is found.
REASONING: Mapping[str, ReasoningMarkup] = {
    "hunyuan_a13b": ReasoningMarkup("<think>", "</think>", answer_begins=("<answer>",), answer_ends=("</answer>",)),
    **dict.fromkeys(_NAMES_OF_THINK, _THINK),
    "granite3_3": ReasoningMarkup("<think>", "</think>", answer_begins=("<response>",), answer_ends=("</response>",)),
    "ernie45": ReasoningMarkup("<think>", "</think>", answer_begins=("<response>",), answer_ends=("</response>",)),
    "deepseek_r1": ReasoningMarkup("<think>", "</think>", starts_inside=True),
    "mistral": ReasoningMarkup("[THINK]", "[/THINK]", needs_special_tokens=True),
    "gemma4": ReasoningMarkup("<|channel>thought", "<channel|>", needs_special_tokens=True),
    "openai_gptoss": ReasoningMarkup(
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", whole_parser=HarmonyParser, frame=FRAME
    ),
    "seed_oss": ReasoningMarkup("<seed:think>", "</seed:think>"),
    "apertus": ReasoningMarkup("<|inner_prefix|>", "<|inner_suffix|>", needs_special_tokens=True),
    "cohere_command3": ReasoningMarkup(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        needs_special_tokens=True,
        answer_begins=("<|START_RESPONSE|>",),
        answer_ends=("<|END_RESPONSE|>",),
    ),
    "cohere_command4": ReasoningMarkup(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        needs_special_tokens=True,
        answer_begins=("<|START_TEXT|>",),
        answer_ends=("<|END_TEXT|>",),
    ),
    "hy_v3": ReasoningMarkup("<think:opensource>", "</think:opensource>", needs_special_tokens=True),
    "kimi_vl": ReasoningMarkup("◁think▷", "◁/think▷"),
    "minicpm3": ReasoningMarkup("<|thought_start|>", "<|thought_end|>", needs_special_tokens=True),
    # a model that decides itself not to think writes the closing tag alone
    "minimax_m3": ReasoningMarkup(
        "<mm:think>", "</mm:think>", needs_special_tokens=True, answer_begins=("</mm:think>",)
    ),
    "kimi_k3": ReasoningMarkup(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        needs_special_tokens=True,
        answer_begins=("<|open|>response<|sep|>",),
        answer_ends=(
            "<|close|>response<|sep|><|close|>message<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
    ),
    "exaone_deep": ReasoningMarkup("<thought>", "</thought>"),
    "solar_open2": ReasoningMarkup("<|think:start|>", "<|think:end|>", needs_special_tokens=True),
    "solar_open": ReasoningMarkup(
        "<|think|>",
        "<|end|>",
        needs_special_tokens=True,
        answer_begins=("<|begin|>assistant", "<|content|>"),
        answer_ends=("<|end|>",),
    ),
    "apriel": ReasoningMarkup(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", answer_ends=("[END FINAL RESPONSE]",)
    ),
    "granite": ReasoningMarkup("Here is my thought process:", "Here is my response:"),
}
