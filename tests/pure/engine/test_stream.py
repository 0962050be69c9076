"""Streamed text is the whole text in pieces: nothing lost, nothing taken back, nothing late."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders

from tests.pure.vocabularies import SPECIALS, TEXTS, byte_level, metaspace, sentencepiece_model, word_level
from tests.refusals import refuses
from weft.engine.core.params import SamplingParams
from weft.engine.text import spm
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.stops import StopAutomaton, StopStrings
from weft.engine.text.stream import TextStream
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import ModelError

KINDS = ("byte-level", "sentencepiece", "sentencepiece without prefix", "metaspace", "no decoder")


@cache
def tokenizer(kind: str) -> Tokenizer:
    match kind:
        case "byte-level":
            return Tokenizer(byte_level(), TokenizerSettings())
        case "metaspace":
            return Tokenizer(metaspace(), TokenizerSettings())
        case "no decoder":
            return Tokenizer(word_level(("[UNK]", "a", "b", "🙂", "")), TokenizerSettings())
    model = sentencepiece_model(add_dummy_prefix=kind == "sentencepiece")
    return Tokenizer(spm.parse_sentencepiece(model)[0], TokenizerSettings())


def stream(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], prompt: Sequence[int] = (), **params: object) -> str:
    """All that a stream gives, while it is checked that no part of it is unsettled."""
    text = TextStream(tokenizer, SamplingParams(**params), prompt)
    return "".join([text.push(chunk) for chunk in chunks]) + text.finish()


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


texts = st.text(
    st.one_of(
        st.sampled_from("ab AB12.,'\n\t\r"),
        st.sampled_from("éü\u0301ﬁ\u200d\ufe0f织線🙂👍🏽👩🇩𝒳\ufffd\u2581"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)
cuts = st.lists(st.integers(0, 200), max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_give_what_decode_gives(kind: str, data: st.DataObject) -> None:
    this = tokenizer(kind)
    # Beyond the vocabulary too: a model's embedding may have more rows than there are tokens.
    ids = data.draw(st.lists(st.integers(0, this.vocab_size + 2), max_size=40))
    skip = data.draw(st.booleans())
    got = stream(this, chunked(ids, data.draw(cuts)), skip_special_tokens=skip)
    assert got == this.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_text_that_was_given_stands(kind: str, data: st.DataObject) -> None:
    this = tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, this.vocab_size - 1), max_size=20))
    text = TextStream(this, SamplingParams())
    given = ""
    for at, id in enumerate(ids):
        given += text.push([id])
        whole = this.decode(ids[: at + 1])
        # No more than an unfinished character is missing.
        assert whole.startswith(given)
        assert set(whole[len(given) :]) <= {"\ufffd"}


@pytest.mark.parametrize("kind", ("byte-level", "sentencepiece"))
@given(text=texts)
def test_a_whole_text_is_out_before_the_end(kind: str, text: str) -> None:
    assume(not any(special in text for special in SPECIALS))  # those are left out of what is streamed
    this = tokenizer(kind)
    out = TextStream(this, SamplingParams())
    assert out.push(this.encode(text, add_special_tokens=False)) == text
    assert out.finish() == ""


@pytest.mark.parametrize("kind", KINDS[:3])
@given(prompt=texts, text=texts)
def test_an_answer_goes_on_where_its_prompt_ends(kind: str, prompt: str, text: str) -> None:
    """The space between the prompt and the first word of the answer is the answer's."""
    this = tokenizer(kind)
    before = this.encode(prompt, add_special_tokens=False)
    ids = this.encode(text, add_special_tokens=False)
    assert this.decode(before) + stream(this, [ids], before) == this.decode(before + ids)


def test_a_character_that_the_prompt_began_comes_whole() -> None:
    this = tokenizer("byte-level")
    ids = this.encode("𝒳", add_special_tokens=False)
    assert len(ids) == 4
    assert stream(this, [ids[2:]], ids[:2]) == "𝒳"


def test_a_prompt_of_special_tokens_leaves_the_answer_at_the_beginning() -> None:
    this = tokenizer("sentencepiece")
    hello = this.encode("The weft", add_special_tokens=False)
    bos = this.id("<s>")
    assert bos is not None
    assert stream(this, [hello], [bos]) == "The weft"
    assert stream(this, [hello], [bos], skip_special_tokens=False) == " The weft"
    assert stream(this, [hello], this.encode("a", add_special_tokens=False)) == " The weft"


def test_special_tokens() -> None:
    this = tokenizer("byte-level")
    ids = this.encode(f"a{SPECIALS[2]}b")
    assert stream(this, [ids]) == "ab"
    assert stream(this, [ids], skip_special_tokens=False) == f"a{SPECIALS[2]}b"


def test_half_a_character_waits_and_ends_as_a_replacement() -> None:
    this = tokenizer("byte-level")
    ids = this.encode("𝒳", add_special_tokens=False)
    text = TextStream(this, SamplingParams())
    assert [text.push([id]) for id in ids] == ["", "", "", "𝒳"]
    text = TextStream(this, SamplingParams())
    assert text.push(ids[:3]) == ""
    assert text.finish() == "\ufffd"


def test_a_line_break_in_bytes_is_not_late() -> None:
    """Llama's line break is a byte token; a stop string of it must end the answer with that very token."""
    this = tokenizer("sentencepiece")
    text = TextStream(this, SamplingParams(stop="\n"))
    assert text.push(this.encode("ab", add_special_tokens=False)) == "ab"
    newline = this.id("<0x0A>")
    assert newline is not None
    assert text.push([newline]) == ""
    assert text.stopped == "\n"


# --- stop strings


def first_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, str] | None:
    """By definition: the match that is complete first (beyond `after` characters), of those the longest."""
    for end in range(after + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return end - len(stop), stop
    return None


def cut(text: str, match: tuple[int, str] | None, keep: bool) -> str:
    return text if match is None else text[: match[0] + (len(match[1]) if keep else 0)]


stops = st.lists(st.text(st.sampled_from("ab \n🙂é"), min_size=1, max_size=5), min_size=1, max_size=4)
stoppable = st.text(st.sampled_from("ab \n🙂é"), max_size=40)


@pytest.mark.parametrize("kind", ("byte-level", "sentencepiece"))
@given(text=stoppable, stops=stops, cuts=cuts, keep=st.booleans())
def test_stop_strings_end_the_text(kind: str, text: str, stops: list[str], cuts: list[int], keep: bool) -> None:
    this = tokenizer(kind)
    ids = this.encode(text, add_special_tokens=False)
    match = first_stop(text, stops)
    out = TextStream(this, SamplingParams(stop=stops, include_stop_str_in_output=keep))
    got, settled = "", 0
    for chunk in chunked(ids, cuts):
        got += out.push(chunk)
        settled += len(chunk)
        if out.stopped is None:
            # Only what may begin a stop string is held back, and nothing where stop strings are kept.
            so_far = this.decode(ids[:settled]).rstrip("\ufffd")
            held = so_far[len(got) :]
            assert so_far.startswith(got)
            assert not held or (not keep and any(stop.startswith(held) for stop in stops))
    assert out.stopped == (match[1] if match else None)
    got += out.finish()
    assert got == cut(text, match, keep)
    assert out.push(ids) == "" or match is None


@given(text=stoppable, stops=stops, cuts=cuts, keep=st.booleans(), minimum=st.integers(0, 20))
def test_stop_strings_wait_for_min_tokens(
    text: str, stops: list[str], cuts: list[int], keep: bool, minimum: int
) -> None:
    this = tokenizer("byte-level")
    ids = this.encode(text, add_special_tokens=False)
    early = this.decode(ids[:minimum]).rstrip("\ufffd") if len(ids) > minimum else text
    match = first_stop(text, stops, after=len(early))
    params = {"stop": stops, "include_stop_str_in_output": keep, "min_tokens": minimum, "max_tokens": None}
    assert stream(this, chunked(ids, cuts), **params) == cut(text, match, keep)


def test_a_character_costs_the_same_however_many_stop_strings_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    plain = StopAutomaton.advance

    def counted(this: StopAutomaton, state: int, char: str) -> int:
        steps.append(char)
        return plain(this, state, char)

    watch = StopStrings(StopAutomaton([f"zq{at}" for at in range(1000)]), keep=False)
    monkeypatch.setattr(StopAutomaton, "advance", counted)
    assert watch.push("abzq") == "ab" and len(steps) == 4
    # "zq9" is complete before "zq99" is: the text ends there, and the rest is not looked at.
    assert watch.push("99") == "" and watch.match == "zq9" and len(steps) == 5


@pytest.mark.parametrize("minimum", [2, 3])
def test_half_a_character_at_the_end_is_text_too(minimum: int) -> None:
    this = tokenizer("byte-level")
    half = this.encode("𝒳", add_special_tokens=False)[:3]
    text = TextStream(this, SamplingParams(stop="\ufffd", min_tokens=minimum))
    assert text.push(half) == ""
    assert text.finish() == ("" if minimum == 2 else "\ufffd")


def test_text_like_a_stop_string_comes_with_the_end() -> None:
    this = tokenizer("byte-level")
    text = TextStream(this, SamplingParams(stop="weft!"))
    assert text.push(this.encode("a we", add_special_tokens=False)) == "a "
    assert text.push(this.encode("f", add_special_tokens=False)) == ""
    assert text.finish() == "wef"


@pytest.mark.parametrize("text", TEXTS)
def test_token_texts_join_to_the_text(text: str) -> None:
    this = tokenizer("byte-level")
    ids = this.encode(text, add_special_tokens=False)
    assert b"".join(map(this.token_bytes, ids)).decode() == text
    this = tokenizer("sentencepiece")
    ids = this.encode(text, add_special_tokens=False)
    assert b"".join(map(this.token_bytes, ids)).decode() == " " + text


def test_a_decoder_that_cannot_go_token_by_token_is_refused() -> None:
    hf_tokenizer = byte_level()
    hf_tokenizer.decoder = decoders.BPEDecoder()
    with refuses(ModelError, "unknown-decoder", "BPEDecoder"):
        Tokenizer(hf_tokenizer, TokenizerSettings())
    hf_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with refuses(ModelError, "unknown-decoder", "Strip"):
        Tokenizer(hf_tokenizer, TokenizerSettings())
