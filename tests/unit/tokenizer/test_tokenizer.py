"""`Tokenizer` against transformers on the same folders, and incremental decoding against decoding at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError, TokenizerError
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer
from inflight.tokenizer.vocabulary_bytes import vocabulary_bytes
from tests.support.fakes_tokenizer import (
    BOS,
    BYTE_VOCAB_SIZE,
    EOS,
    EOS_ID,
    USER,
    USER_ID,
    byte_tokenizer,
    save_folder,
    trained,
)

KINDS = ["byte_level", "byte_fallback", "word_piece", "metaspace"]
TEXTS = [
    "Once upon a time",
    " leading and trailing ",
    "two  spaces\n\nand\tlines",
    "naïve café 東京 🙂 unseen: Ωж𝕏",
    f"a{USER}b {EOS} c",
    "",
    "don't, stop.",
]


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip_special_tokens: bool = True) -> str:
    decoder = tokenizer.incremental_decoder(prompt, skip_special_tokens)
    return "".join(decoder.push(token_id) for token_id in ids) + decoder.flush()


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("tokenizers") / request.param, request.param)


def test_equals_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = folder_tokenizer(folder)
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.unk_token_id,
    )
    assert ours.all_special_ids == set(theirs.all_special_ids)
    assert ours.special_tokens == theirs.special_tokens_map
    assert [ours.id_to_piece(i) for i in range(ours.vocab_size)] == theirs.convert_ids_to_tokens(range(ours.vocab_size))


def token(content: str, **flags: bool) -> dict[str, object]:
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_only_the_config_lists_equal_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    save_folder(tmp_path, kind)
    first = folder_tokenizer(tmp_path).vocab_size
    listed = {
        first + 1: token("<|im_end|>", special=True),
        first: token("<|im_start|>", special=True, lstrip=True),
        first + 2: token("<tool>", rstrip=True),
        first + 3: token("Word", single_word=True, normalized=True),
        trained(kind).token_to_id(USER): token(USER, rstrip=True),  # other flags than in tokenizer.json
    }
    save_folder(tmp_path, kind, added_tokens_decoder={str(i): entry for i, entry in listed.items()})
    ours, theirs = folder_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a  <|im_start|>user\n<|im_end|>", "<tool>  b Word Words<|im_end|>", f"x {USER}  y"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert first + 1 in ours.encode("<|im_end|>")
    assert ours.vocab_size == len(theirs) == first + 4
    assert first + 1 in ours.all_special_ids
    assert first + 2 not in ours.all_special_ids


def test_a_listed_id_that_cannot_be_given_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_folder(tmp_path, "byte_level", added_tokens_decoder={"9999": token("<new>")})
    with caplog.at_level("WARNING"):
        tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.encode("<new>")[-1] == tokenizer.vocab_size - 1
    [record] = caplog.records
    assert "'<new>'" in record.getMessage()


@pytest.mark.parametrize("listed", [{"x": token("a")}, {"5": "a"}, {"5": {"special": True}}, [3], "a"])
def test_a_malformed_list_of_tokens(tmp_path: Path, listed: object) -> None:
    save_folder(tmp_path, "byte_level", added_tokens_decoder=listed)
    with pytest.raises(TokenizerError, match="added_tokens_decoder in"):
        folder_tokenizer(tmp_path)


@given(st.text(), st.booleans())
def test_encode_equals_the_library(text: str, add: bool) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add), skip_special_tokens=False) == text


def test_the_byte_tokenizer_is_bytes() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("aé🙂") == list("aé🙂".encode())
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tokenizer.token_bytes(EOS_ID) == b"</s>"
    assert tokenizer.token_bytes(5000) == b""


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    save_folder(tmp_path, "byte_level")
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": BOS,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    text = "Once upon a time there was a park"
    assert folder_tokenizer(tmp_path).encode(text) == trained("byte_level").encode(text).ids


def test_special_tokens_as_objects_and_from_the_map(tmp_path: Path) -> None:
    save_folder(tmp_path, "byte_level", bos_token={"content": BOS, "lstrip": False}, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": USER, "pad_token": "[absent]"}))
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": USER, "pad_token": "[absent]"}
    assert tokenizer.eos_token_id == trained("byte_level").token_to_id(USER)
    assert tokenizer.vocab_size == trained("byte_level").get_vocab_size()  # the absent token was not added


def test_a_named_token_is_special_even_if_not_flagged(tmp_path: Path) -> None:
    save_folder(tmp_path, "byte_level")
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in state["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = folder_tokenizer(tmp_path)
    assert len(tokenizer.all_special_ids) == 3
    assert tokenizer.decode(tokenizer.encode(f"a{EOS}b")) == "ab"


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer=\.\.\..*skip_tokenizer_init=True"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone cannot be read"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        folder_tokenizer(tmp_path)


def test_a_lone_surrogate_is_the_users_mistake() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate at character 1"):
        byte_tokenizer().encode("a\ud800")


# -- incremental decoding ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, BYTE_VOCAB_SIZE + 2)), st.lists(st.integers(0, 258)), st.booleans())
def test_bytes_stream_as_they_decode(ids: list[int], prompt: list[int], skip: bool) -> None:
    tokenizer = byte_tokenizer()
    assert stream(tokenizer, prompt, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=3))), st.booleans())
def test_almost_valid_bytes_stream_as_they_decode(parts: list[bytes], skip: bool) -> None:
    ids = list(b"".join(parts))
    assert stream(byte_tokenizer(), [65], ids, skip_special_tokens=skip) == byte_tokenizer().decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(st.lists(st.lists(st.integers(0, 410), max_size=6), max_size=6), st.booleans())
def test_many_tokens_at_once_are_the_same_as_one_by_one(kind: str, groups: list[list[int]], skip: bool) -> None:
    tokenizer = Tokenizer(trained(kind), {"bos_token": BOS, "eos_token": EOS})
    together, alone = (tokenizer.incremental_decoder([5], skip) for _ in range(2))
    for ids in groups:
        assert together.push_all(ids) == "".join(alone.push(token_id) for token_id in ids)
    assert together.flush() == alone.flush()


@given(st.lists(st.integers(0, 410)), st.booleans())
def test_trained_byte_level_streams_as_it_decodes(ids: list[int], skip: bool) -> None:
    tokenizer = Tokenizer(trained("byte_level"), {"eos_token": EOS})
    assert stream(tokenizer, [0], ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["word_piece", "metaspace", "byte_fallback"])
@given(data=st.data())
def test_windows_stream_as_prompt_and_output_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(trained(kind), {"eos_token": EOS})
    is_byte = [tokenizer.byte_fallback(i) is not None for i in range(tokenizer.vocab_size)]
    plain = st.sampled_from([*(i for i in range(tokenizer.vocab_size) if not is_byte[i]), tokenizer.vocab_size + 1])
    prompt = data.draw(st.lists(plain, max_size=20))
    ids = data.draw(st.lists(plain))
    if kind == "byte_fallback":
        characters = data.draw(st.lists(st.tuples(st.text(max_size=3), plain)))
        for text, token_id in characters:  # runs of byte tokens that are valid UTF-8
            ids += [_byte_token(tokenizer, byte) for byte in text.encode()]
            ids.append(token_id)
    skip = data.draw(st.booleans())
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert stream(tokenizer, prompt, ids, skip_special_tokens=skip) == whole[len(before) :]


def _byte_token(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.byte_fallback(i) == byte)


@given(st.binary(max_size=12))
def test_byte_fallback_keeps_good_characters(data: bytes) -> None:
    tokenizer = Tokenizer(trained("byte_fallback"))
    ids = [_byte_token(tokenizer, byte) for byte in data]
    word = tokenizer.encode("time", add_special_tokens=False)
    text = stream(tokenizer, word, [*ids, *word])
    expected, rest = "", data
    while rest:  # one character, or one "�" for a byte that begins none
        for size in (1, 2, 3, 4):
            try:
                expected, rest = expected + rest[:size].decode(), rest[size:]
                break
            except UnicodeDecodeError:
                continue
        else:
            expected, rest = expected + "�", rest[1:]
    assert text == expected + " time"


def test_a_character_comes_out_when_its_last_byte_does() -> None:
    for tokenizer, ids in (
        (byte_tokenizer(), list("é🙂".encode())),
        (fallback := Tokenizer(trained("byte_fallback")), [_byte_token(fallback, byte) for byte in "é🙂".encode()]),
    ):
        decoder = tokenizer.incremental_decoder([1], True)
        assert [decoder.push(token_id) for token_id in ids] == ["", "é", "", "", "", "🙂"]
        assert decoder.flush() == ""
        assert [decoder.push(token_id) for token_id in ids[2:-1]] == ["", "", ""]
        assert decoder.flush() == tokenizer.decode(ids[2:-1]) != ""


def test_a_token_that_is_the_replacement_character_comes_out_once() -> None:
    """Its text is held back, for it could be the start of a character. A byte token after it shows that it is not."""
    backend = tokenizers.Tokenizer.from_str(trained("byte_fallback").to_str())
    backend.add_tokens(["�"])
    tokenizer, broken = Tokenizer(backend), backend.token_to_id("�")
    word = tokenizer.encode("time", add_special_tokens=False)
    character = [_byte_token(tokenizer, byte) for byte in "é".encode()]
    ids = [broken, *character, *word, broken, *word, broken]
    assert stream(tokenizer, word, ids) == tokenizer.decode([*word, *ids])[len("time") :]
    assert tokenizer.decode(ids).count("�") == 3


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    tokenizer = Tokenizer(trained("byte_fallback"), {"bos_token": BOS})
    word = tokenizer.encode("time", add_special_tokens=False)
    assert stream(tokenizer, tokenizer.encode("Once upon a"), word) == " time"
    assert stream(tokenizer, [tokenizer.bos_token_id or 0], word) == "time"
    assert tokenizer.decode(word) == "time"


def test_ids_without_a_token_change_nothing() -> None:
    tokenizer = Tokenizer(trained("byte_fallback"))
    word = tokenizer.encode("time", add_special_tokens=False)
    for prompt in ([], [9999] * 40):
        assert stream(tokenizer, prompt, [9999, *word, 9999]) == tokenizer.decode(word) == "time"
    assert stream(tokenizer, [*word, *([9999] * 10)], [9999, *word]) == " time"
    assert stream(tokenizer, word, [*word, 9999, *word]) == " time time"


def test_a_space_as_the_first_byte() -> None:
    tokenizer = Tokenizer(trained("byte_fallback"))
    ids = [_byte_token(tokenizer, 0x20), *tokenizer.encode("time", add_special_tokens=False)]
    assert stream(tokenizer, [], ids) == tokenizer.decode(ids) == " time"


def test_text_of_one_token() -> None:
    assert byte_tokenizer().decode_token(0xC3) == "�"
    assert byte_tokenizer().decode_token(USER_ID) == USER
    assert byte_tokenizer().decode_token(9999) == ""
    fallback = Tokenizer(trained("byte_fallback"))
    first, *_ = fallback.encode("the", add_special_tokens=False)
    assert fallback.decode_token(first) == (fallback.id_to_piece(first) or "").replace("▁", " ")
    assert fallback.decode_token(first).startswith(" t")
    assert fallback.decode_token(_byte_token(fallback, 0x0A)) == "\n"
    assert fallback.decode_token(_byte_token(fallback, 0xC3)) == "�"
    word_piece = Tokenizer(trained("word_piece"))
    assert word_piece.decode_token(word_piece.encode("the")[0]).startswith(" t")


def test_a_window_decodes_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear time: also where the text ends in "�" for long."""
    tokenizer = Tokenizer(trained("byte_fallback"))
    sizes: list[int] = []
    decode = tokenizer.decode

    def record(ids: list[int], skip_special_tokens: bool = True) -> str:
        sizes.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", record)
    ids = [*range(4, 260), *([_byte_token(tokenizer, 0xC3)] * 200), *range(260, tokenizer.vocab_size)]
    stream(tokenizer, list(range(260, 300)), ids)
    assert max(sizes) <= 16
    assert sum(sizes) < 6 * len(ids)


def test_an_id_that_no_vocabulary_has_takes_no_memory() -> None:
    """A list with an entry for each id below it would have 8 GB."""
    content = json.loads(trained("byte_level").to_str())
    content["model"]["vocab"]["zz"] = 2**31
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
    with pytest.raises(TokenizerError, match="'zz' the id 2147483648"):
        vocabulary_bytes(tokenizer)


def test_a_text_has_the_same_tokens_each_time(tmp_path: Path) -> None:
    """Dropout is for training."""
    path = save_folder(tmp_path, "byte_level") / "tokenizer.json"
    content = json.loads(path.read_text())
    text = "the lazy dog " * 20
    ids = folder_tokenizer(tmp_path).encode(text)
    content["model"]["dropout"] = 0.5
    path.write_text(json.dumps(content))
    assert folder_tokenizer(tmp_path).encode(text) == ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_vocabulary_bytes_make_up_the_text(kind: str) -> None:
    tokenizer = Tokenizer(trained(kind), {"bos_token": BOS, "eos_token": EOS}, [USER])
    vocabulary = vocabulary_bytes(tokenizer)
    assert len(vocabulary) == tokenizer.vocab_size
    texts = ["the lazy dog", "Größe 東京 🙂\n\ttab"] + [f"a {USER} b"] * (
        kind == "byte_level"
    )  # the other moves spaces
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(vocabulary[token_id] for token_id in token_ids).decode()
        assert spelled.removeprefix(" " if kind == "byte_fallback" else "") == text
    assert {vocabulary[token_id] for token_id in tokenizer.all_special_ids} >= {BOS.encode(), EOS.encode()}


def test_a_vocabulary_without_bytes() -> None:
    with pytest.raises(TokenizerError, match="have no bytes of their own"):
        vocabulary_bytes(Tokenizer(trained("word_piece")))
