"""The fields of requests that several APIs have, as pydantic models, in the words of all APIs and engines."""
