"""`OWNER`: the client whose uuids a request may use for its images. It imports nothing, because each server sets it."""

from contextvars import ContextVar

# The digest of the API key of the request that this task answers; "" if the server has no keys, or there is none.
OWNER: ContextVar[str] = ContextVar("inflight_owner_of_images", default="")
