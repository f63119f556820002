"""The families of models that Inflight computes itself. A family is one file of this folder and one name here."""

from importlib import import_module

from inflight.config.families.family import Family

NAMES = """
    llama mistral qwen2 qwen3 qwen3_5 qwen3_next gemma2 gemma3 gemma4 phi3 olmo2 olmo3 granite smollm3 glm
    glm4 ministral ministral3 lfm2 deepseek_v2 deepseek_v3 youtu minicpm3
    qwen2_moe qwen3_moe mixtral olmoe granitemoe gpt_oss glm4_moe glm4_moe_lite qwen3_5_moe lfm2_moe
""".split()
FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{name}").FAMILY for name in NAMES)
