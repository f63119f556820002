"""What a method of a text, number or container costs, and how large its result can be: `charge_method`.

A method that is not named here reads all that it is given, and returns no more than that. This holds for Python's own classes,
which are the only ones with methods that a template can reach, and for `Markup`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from markupsafe import Markup

from inflight.tokenizer.sandbox.budget import MAX_TEXT, TemplateBudget, TemplateLimitError

_ESCAPED = 5  # " becomes &#34;
_ESCAPE_STEPS = 15
_MAX_SLOW = 2**16  # characters that a method which is written in Python may read
_MAX_CASED = 2**24  # characters: Python takes 12 bytes of memory for each while it changes their case
_MAX_TRANSLATED = 2**22
_MAX_KEYS = 2**16
_ENCODINGS = frozenset(("utf-8", "utf8", "ascii", "latin-1", "latin1"))
_ON_ERRORS = frozenset(("strict", "ignore", "replace"))
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_MARKUP_STEPS = 150  # its methods are written in Python
_SMALL = 1000
_SMALL_ARGUMENT = 50
_USUAL = frozenset(
    ("endswith", "lower", "lstrip", "rsplit", "rstrip", "split", "startswith", "strip", "title", "upper")
)
_SHORT = 2**16  # below, the worst that a text can have is little

Charge = Callable[..., None]


def charge_method(
    budget: TemplateBudget, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """To be called before `owner.name(*args, **kwargs)`.

    Raises:
        TemplateLimitError: the call would take too much.
    """
    if isinstance(owner, dict) and name in ("get", "items", "keys", "values"):
        if args and type(args[0]) is not str:
            budget.read(args[0])
        return
    budget.read(owner, *args, *kwargs.values())
    charge = _CHARGES.get(name)
    if charge is not None:
        charge(budget, owner, *args, **kwargs)
    if isinstance(owner, Markup):
        budget.spend(_MARKUP_STEPS + 4 * len(owner))
        budget.make(_ESCAPED * (len(owner) + sum(budget.size(value)[1] for value in (*args, *kwargs.values()))))


def is_small(owner: Any, name: str, args: Sequence[Any]) -> bool:
    """Whether a call is among the usual ones of short texts, which take no longer than any other call."""
    if type(owner) is not str or len(owner) > _SMALL or name not in _USUAL:
        return False
    if not args:
        return True
    return len(args) == 1 and type(args[0]) is str and len(args[0]) <= _SMALL_ARGUMENT


def charge_escape(budget: TemplateBudget, value: object) -> None:
    """Before the text of `value` is written for HTML."""
    budget.spend(_ESCAPE_STEPS)
    budget.read(value)
    budget.make(_ESCAPED * budget.size(value)[1])


def charge_keys(budget: TemplateBudget, keys: Sized) -> None:
    """Before a dict or a set of these keys is made. Python looks for a place for each number among all those before it, if a
    template has chosen them badly."""
    num_keys = len(keys)
    budget.check_items(num_keys)
    if num_keys > _MAX_KEYS:
        raise TemplateLimitError(f"it makes a dict of more than {_MAX_KEYS:,} keys")
    budget.read(keys)
    budget.make(64 * num_keys)
    if not (isinstance(keys, Iterable) and all(isinstance(key, str) for key in keys)):
        budget.spend(num_keys * num_keys)


def charge_replace(budget: TemplateBudget, text: Any, old: Any, new: Any, count: Any = -1) -> None:
    _search(budget, text)
    if len(new) > len(old):
        found = text.count(old)
        if isinstance(count, int) and count >= 0:
            found = min(found, count)
        budget.make(len(text) + found * (len(new) - len(old)))


def charge_width(budget: TemplateBudget, text: Any, width: Any = 80, *_: Any) -> None:
    if isinstance(width, int):
        budget.make(max(len(text), width))


def charge_strip(budget: TemplateBudget, text: Any, chars: Any = None) -> None:
    if isinstance(chars, (str, bytes)):
        budget.spend(len(text) * len(chars) >> 5)


def charge_case(budget: TemplateBudget, text: Any) -> None:
    if len(text) > _MAX_CASED:
        raise TemplateLimitError(f"it changes the case of more than {_MAX_CASED:,} characters")
    budget.spend(len(text) >> 1)


def charge_slow(budget: TemplateBudget, text: Any, *_: Any, **__: Any) -> None:
    """Of what is written in Python, and may take time that grows with the square of the length."""
    length = budget.size(text)[1]
    if length > _MAX_SLOW:
        raise TemplateLimitError(f"it searches more than {_MAX_SLOW:,} characters for tags, words or lines")
    budget.spend(8 * length + (length * length >> 11))


def charge_join(budget: TemplateBudget, separator: Any, values: Any) -> None:
    items, characters, _ = budget.size(values)
    if isinstance(values, (str, bytes)):
        items = len(values)
    budget.check_items(items)
    budget.spend(2 * items)
    budget.make(characters + items * len(separator))


def _expandtabs(budget: TemplateBudget, text: Any, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int) and isinstance(text, (str, bytes)):
        tabs = text.count("\t") if isinstance(text, str) else text.count(b"\t")
        budget.make(len(text) + tabs * max(tabsize, 0))


def _translate(budget: TemplateBudget, text: Any, table: Any, *_: Any, **__: Any) -> None:
    longest = 1
    if isinstance(table, dict):
        longest = max((len(value) for value in table.values() if isinstance(value, str)), default=1)
    elif isinstance(table, (list, tuple)):
        longest = max((len(value) for value in table if isinstance(value, str)), default=1)
    if len(text) > _MAX_TRANSLATED:
        raise TemplateLimitError(f"it translates more than {_MAX_TRANSLATED:,} characters")
    budget.make(len(text) * max(longest, 1))
    budget.spend(2 * len(text))


def _maketrans(budget: TemplateBudget, _: Any, first: Any, *__: Any) -> None:
    if isinstance(first, Sized):
        if len(first) > _MAX_KEYS:
            raise TemplateLimitError(f"it makes a dict of more than {_MAX_KEYS:,} keys")
        if not isinstance(first, (str, bytes)):
            charge_keys(budget, first)


def _split(budget: TemplateBudget, text: Any, sep: Any = None, maxsplit: Any = -1) -> None:
    budget.spend(len(text) >> 3)
    most = len(text) // 2 + 1
    if most > _SHORT and isinstance(sep, (str, bytes)) and sep:
        most = text.count(sep) + 1
    if isinstance(maxsplit, int) and maxsplit >= 0:
        most = min(most, maxsplit + 1)
    budget.check_items(most)
    budget.make(8 * most if most > _SHORT else 0)


def _rsplit(budget: TemplateBudget, text: Any, sep: Any = None, maxsplit: Any = -1) -> None:
    _search_backwards(budget, text, sep)
    _split(budget, text, sep, maxsplit)


def _splitlines(budget: TemplateBudget, text: Any, keepends: Any = False) -> None:
    if len(text) > _SHORT:
        ends = _LINE_ENDS if isinstance(text, str) else (b"\n", b"\r")
        budget.spend(len(text) >> 2)
        budget.check_items(1 + sum(text.count(end) for end in ends))


def _search(budget: TemplateBudget, text: Any, *_: Any) -> None:
    """Of what looks for a text in another one, beside reading both."""
    if isinstance(text, (str, bytes)):
        budget.spend(len(text) >> 5)


def _search_backwards(budget: TemplateBudget, text: Any, searched: Any, *_: Any) -> None:
    """Python compares with the whole of what is searched at each place, in the worst case."""
    if isinstance(searched, (str, bytes)):
        budget.spend(len(text) * len(searched) >> 3)


def _encode(budget: TemplateBudget, _: Any, encoding: Any = "utf-8", errors: Any = "strict") -> None:
    """Other encodings take time that grows with the square of the length, or write a name for each character."""
    known = isinstance(encoding, str) and encoding.lower() in _ENCODINGS
    if not known or errors not in _ON_ERRORS:
        raise TemplateLimitError(f"it asks for the encoding {encoding!r:.40} ({errors!r:.40}); it may take UTF-8")


def _to_bytes(budget: TemplateBudget, _: Any, length: Any = 1, *__: Any, **___: Any) -> None:
    budget.check_items(length)


def _from_bytes(budget: TemplateBudget, _: Any, values: Any, *__: Any, **___: Any) -> None:
    budget.check_bits(1 << min(8 * len(values), MAX_TEXT))


def _fromkeys(budget: TemplateBudget, _: Any, keys: Any, *__: Any) -> None:
    charge_keys(budget, keys)


def _copy(budget: TemplateBudget, owner: Any) -> None:
    budget.check_items(len(owner))
    budget.make(64 * len(owner))


_CHARGES: dict[str, Charge] = {
    "capitalize": charge_case,
    "casefold": charge_case,
    "center": charge_width,
    "copy": _copy,
    "count": _search,
    "decode": _encode,
    "encode": _encode,
    "escape": lambda budget, _, value: charge_escape(budget, value),
    "expandtabs": _expandtabs,
    "find": _search,
    "from_bytes": _from_bytes,
    "fromkeys": _fromkeys,
    "index": _search,
    "join": charge_join,
    "ljust": charge_width,
    "lower": charge_case,
    "lstrip": charge_strip,
    "maketrans": _maketrans,
    "partition": _search,
    "replace": charge_replace,
    "rfind": _search_backwards,
    "rindex": _search_backwards,
    "rjust": charge_width,
    "rpartition": _search_backwards,
    "rsplit": _rsplit,
    "rstrip": charge_strip,
    "split": _split,
    "splitlines": _splitlines,
    "strip": charge_strip,
    "striptags": charge_slow,
    "swapcase": charge_case,
    "title": charge_case,
    "to_bytes": _to_bytes,
    "translate": _translate,
    "unescape": charge_slow,
    "upper": charge_case,
    "zfill": charge_width,
}
