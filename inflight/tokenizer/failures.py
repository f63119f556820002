"""What the errors of the `tokenizers` library mean to a request."""

from inflight.damaged_files import is_panic
from inflight.errors import InvalidRequestError


def encoding_failure(error: BaseException, param: str = "") -> BaseException:
    """Returns the error of a request whose text cannot be encoded because of `error`; `error` itself, if it has another reason.
    `param`: the parameter that is the text.

    The library panics, for example, if the regular expression of its pre-tokenizer gives up: at a text of millions of blanks.
    """
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequestError(
            f"the text holds a lone surrogate at character {error.start}: it is not valid Unicode", param
        )
    if not is_panic(error):
        return error
    return InvalidRequestError(f"the tokenizer cannot encode this text: {error}", param)


def decoding_failure(error: BaseException) -> BaseException:
    """The same for token ids that cannot be decoded."""
    if not is_panic(error):
        return error
    return InvalidRequestError(f"the tokenizer cannot decode these tokens: {error}")
