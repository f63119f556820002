"""How errors name the parts of a prompt with images (`InvalidRequestError.param`). If a prompt has names of its own for its
images ("multi_modal_places"), they are used instead."""

from inflight.interface.image_prompts import IMAGES

OPTIONS = "mm_processor_kwargs"


def image_place(index: int) -> str:
    """The image with this index."""
    return f"{IMAGES}[{index}]"


def uuid_place(index: int) -> str:
    """The uuid of the image with this index."""
    return f"multi_modal_uuids['image'][{index}]"
