"""`OWNER`: whose uuids the images of the present request have. It imports nothing, because each server sets it."""

from contextvars import ContextVar

# The digest of the API key of the request that this task answers; "" if the server has no keys, or there is none.
OWNER: ContextVar[str] = ContextVar("inflight_owner_of_images", default="")
