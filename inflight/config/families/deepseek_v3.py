"""DeepSeek-V3 with dense layers: the attention of DeepSeek-V2. (Layers with experts are computed by transformers.)"""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.deepseek_v2 import is_dense, make_dense, read_latent_attention
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    interleaved = fields.boolean("rope_interleave", True)
    return make_dense(fields, read_latent_attention(fields, interleaved=interleaved))


FAMILY = Family(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", parse=_parse, takes=is_dense)
