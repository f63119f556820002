"""`ModelInfo`: what callers may know of the model. `make_input_processor`: what turns their prompts into requests."""

from dataclasses import dataclass

from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.damaged_files import named_errors
from inflight.engine.request.image_support import make_image_support
from inflight.engine.request.input_processor import InputProcessor
from inflight.errors import ConfigError
from inflight.hub import read_generation_config
from inflight.tokenizer.source import read_chat_template, read_tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model that is served.

    Attributes:
        name: the model's name as the user gave it; "embedded" for the small model that Inflight contains.
        num_kv_cache_tokens: how many tokens fit into the KV cache.
        block_size: tokens of one KV block.
        num_bytes: the size of the files with weights.
        takes_images: whether prompts may have images.
    """

    name: str
    architecture: ModelArchitecture
    load_format: str
    num_bytes: int
    max_model_len: int
    vocab_size: int
    dtype: str
    max_num_seqs: int
    num_kv_cache_tokens: int
    block_size: int
    takes_images: bool

    @classmethod
    def of(cls, config: EngineConfig, num_kv_cache_tokens: int) -> "ModelInfo":
        folder = config.model.folder
        files = [folder] if folder.is_file() else folder.glob("*.safetensors")
        return cls(
            name=config.model.name,
            architecture=config.model.architecture,
            load_format=config.model.load_format,
            num_bytes=sum(path.stat().st_size for path in files),
            max_model_len=config.model.max_model_len,
            vocab_size=config.model.architecture.vocab_size,
            dtype=config.model.dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_kv_cache_tokens=num_kv_cache_tokens,
            block_size=config.cache.block_size,
            takes_images=config.model.architecture.vision is not None,
        )


def make_input_processor(args: EngineArgs, config: EngineConfig) -> InputProcessor:
    """Make an input processor. Reads the tokenizer, the chat template and the generation defaults.

    Raises:
        ConfigError: one of these files cannot be read.
    """
    tokenizer = chat_template = None
    if not args.skip_tokenizer_init:
        tokenizer = read_tokenizer(config.model.folder, args.tokenizer)
        vision = config.model.architecture.vision
        image_token = None if vision is None else tokenizer.id_to_piece(vision.image_token_id)
        chat_template = read_chat_template(config.model.folder, args.tokenizer, args.chat_template, image_token or "")
    with named_errors(ConfigError, config.model.folder, "its tokens and generation_config.json"):
        return InputProcessor(
            config,
            tokenizer,
            chat_template,
            read_generation_config(config.model.folder),
            seed=0 if args.seed is None else args.seed,
            use_generation_defaults=args.generation_config == "auto",
            images=make_image_support(args, config, tokenizer),
        )
