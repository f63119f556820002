"""The families of models that Inflight computes itself. A family is one file of this folder and one name here."""

from importlib import import_module

from inflight.config.families import transformers_vision
from inflight.config.families.family import Family
from inflight.config.families.vision_family import VisionFamily

NAMES = """
    llama mistral qwen2 qwen3 qwen3_5 qwen3_next gemma2 gemma3 gemma4 phi3 olmo2 olmo3 granite granitemoehybrid smollm3 glm
    glm4 ministral ministral3 lfm2 deepseek_v2 deepseek_v3 youtu minicpm3
    qwen2_moe qwen3_moe mixtral olmoe granitemoe gpt_oss glm4_moe glm4_moe_lite qwen3_5_moe lfm2_moe ernie4_5_moe hunyuan_v1_moe
    phimoe
""".split()
VISION_NAMES = """
    idefics3 smolvlm qwen3_vl qwen3_vl_moe qwen2_5_vl qwen3_5_vision qwen3_5_moe_vision gemma3_vision gemma4_vision
""".split()
ENCODER_NAMES = "bert roberta xlm_roberta camembert distilbert mpnet albert modernbert nomic_bert eurobert".split()
FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{name}").FAMILY for name in NAMES)
# These have no head for tokens. The hidden states of their last layer are pooled.
ENCODERS: tuple[Family, ...] = tuple(import_module(f"{__name__}.{name}").FAMILY for name in ENCODER_NAMES)
# A tower for images in front of one of the families for text.
VISION_FAMILIES: tuple[VisionFamily, ...] = tuple(
    import_module(f"{__name__}.{name}").VISION_FAMILY for name in VISION_NAMES
)
# The same, with a tower that the code of transformers computes.
TRANSFORMERS_VISION: tuple[VisionFamily, ...] = transformers_vision.families(FAMILIES)
