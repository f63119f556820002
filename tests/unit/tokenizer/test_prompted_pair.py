"""Which chat templates are for pairs. What is made of pairs is tested against transformers in tests/e2e."""

import pytest

from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.prompted_pair import PairTemplate, PromptedPairs
from inflight.tokenizer.text_pair import PairLimits
from tests.support.fakes_tokenizer import byte_tokenizer

FLAT = "{% for m in messages %}{% if m.role in ('query', 'document') %}<{{ m.content }}>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (FLAT, "<a><b>"),
        (FLAT.replace("m.content", "m.content[0].text"), "<a><b>"),  # reads parts
        ("{% for m in messages %}<{{ m.role }}: {{ m.content }}>{% endfor %}", None),  # shows whatever there is
        ("{% for m in messages if m.role == 'user' %}query document {{ m.content }}{% endfor %}", None),
        ("query document {{ raise_exception('no') }}", None),
    ],
)
def test_a_template_for_pairs_has_both_roles(source: str, expected: str | None) -> None:
    found = PairTemplate.find(ChatTemplate({"default": source}))
    assert (found and found.render("a", "b")) == expected
    assert PairTemplate.find(ChatTemplate({})) is None and PairTemplate.find(None) is None


def test_each_text_may_be_cut() -> None:
    template = PairTemplate.find(ChatTemplate({"default": FLAT + "!"}))
    assert template is not None
    tokenizer = byte_tokenizer()
    pairs = PromptedPairs(tokenizer, template, 40)
    for limits, expected in (
        (PairLimits(), "<one><other>!"),
        (PairLimits(None, 2, 3), "<on><oth>!"),
        (PairLimits(10), "<one><ot>!"),
        (PairLimits(100), "<one><other>!"),
    ):
        assert tokenizer.decode(pairs.encode("one", "other", limits).token_ids) == expected
