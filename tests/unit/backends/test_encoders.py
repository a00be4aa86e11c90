from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk import assets
from fedone_sdk.backends.encoders import CausalEncoder, ClozeEncoder, read_max_length
from fedone_sdk.errors import BackendError, LabelWordError, SpecError
from fedone_sdk.task import Part

tokenizers = pytest.importorskip("tokenizers")

TOKENIZER = assets.path("roberta_mini") / "tokenizer.json"
CAUSAL = CausalEncoder(TOKENIZER, 128)


@pytest.fixture(scope="module")
def encoder() -> ClozeEncoder:
    return ClozeEncoder(TOKENIZER, 128)


@pytest.mark.parametrize("text", ["<mask>", "</s><s>", " <mask> ", "<pad>", "x<unk>"])
def test_special_tokens_in_a_text_are_text(encoder: ClozeEncoder, text: str) -> None:
    for kind in ("field", "prompt", "text"):
        cloze = encoder.encode((Part(kind, text), Part("mask", ""), Part("text", text)))
        specials = [token for token in cloze.ids if token in (0, 1, 2, 3, 8191)]
        assert specials == [0, 8191, 2]
        assert cloze.ids[cloze.mask_index] == 8191
        assert text in encoder._tokenizer.decode(cloze.ids[cloze.mask_index + 1 : -1])


@given(text=st.text())
def test_no_text_makes_a_special_token(encoder: ClozeEncoder, text: str) -> None:
    cloze = encoder.encode((Part("text", text[:30]), Part("mask", "")))
    assert not {0, 1, 2, 3, 8191} & set(cloze.ids[1 : cloze.mask_index])


# Long texts of every script, without the letters that mark the seams of the template.
texts = st.one_of(
    st.text(st.characters(exclude_characters="[]", codec="utf-8"), max_size=300),
    st.builds(lambda word, times: word * times, st.sampled_from((" a", "\U0001f600", "  ", "é")),
              st.integers(0, 300)),
)  # fmt: skip


@given(prompt=texts.filter(lambda text: len(text.encode()) < 90), first=texts, second=texts)
def test_only_fields_are_shortened(
    encoder: ClozeEncoder, prompt: str, first: str, second: str
) -> None:
    cloze = encoder.encode(
        (
            Part("prompt", prompt),
            Part("text", "["),
            Part("field", first),
            Part("text", "] It was"),
            Part("mask", ""),
            Part("text", ".["),
            Part("field", second),
            Part("text", "]!"),
        )
    )
    assert len(cloze.ids) <= 128
    assert cloze.ids[cloze.mask_index] == 8191
    decode = encoder._tokenizer.decode
    before, after = cloze.ids[1 : cloze.mask_index], cloze.ids[cloze.mask_index + 1 : -1]
    left = re.fullmatch(re.escape(prompt) + r"\[(.*)\] It was", decode(before), re.DOTALL)
    right = re.fullmatch(r"\.\[(.*)\]!", decode(after), re.DOTALL)
    assert left
    assert right
    assert first.startswith(left[1])
    assert second.startswith(right[1])


def test_the_longest_field_is_shortened_first(encoder: ClozeEncoder) -> None:
    def lengths(first: int, second: int) -> tuple[int, int, int]:
        parts = (
            Part("field", " a" * first),
            Part("text", "?"),
            Part("mask", ""),
            Part("field", " a" * second),
        )
        ids, mask_index = encoder.encode(parts)
        return mask_index - 2, len(ids) - mask_index - 2, len(ids)

    # 124 tokens are left for the fields.
    assert lengths(60, 64) == (60, 64, 128)
    assert lengths(100, 30) == (94, 30, 128)
    assert lengths(30, 5000) == (30, 94, 128)
    assert lengths(500, 5000) == (62, 62, 128)


def test_a_field_that_shares_its_only_token_with_the_template_can_go(encoder: ClozeEncoder) -> None:
    prompt, space, field = Part("prompt", " a" * 125), Part("text", " "), Part("field", "b")
    cloze = encoder.encode((prompt, space, field, Part("mask", "")))
    assert cloze == encoder.encode((prompt, Part("mask", "")))


def test_a_file_that_is_no_tokeniser(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for kind in (ClozeEncoder, CausalEncoder):
        with pytest.raises(SpecError, match=r"tokenizer\.json: cannot load the tokeniser"):
            kind(tmp_path / "tokenizer.json", 128)


def words(tmp_path: Path, *, start: str = "", end: str = "", metaspace: bool = False) -> Path:
    """A tokeniser of whole words and bytes."""
    names = ["<s>", "</s>", "\u2581a", "\u2581great", "\u2581movie", "a", "great", "\n", "\u2581"]
    pieces = [(name, -1.0 if name.startswith("\u2581") and name[1:] else -5.0) for name in names]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, False))
    if metaspace:
        tokenizer.normalizer = tokenizers.normalizers.Sequence(
            [
                tokenizers.normalizers.Prepend("\u2581"),
                tokenizers.normalizers.Replace(" ", "\u2581"),
            ]
        )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if start or end:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{start} $A {end}".strip(), special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_causal_input_starts_as_the_models_own_tokeniser_starts_it(tmp_path: Path) -> None:
    parts = (Part("prompt", "a"), Part("field", " great"))
    for start, end, specials in (
        ("<s>", "", [0]),
        ("<s>", "</s>", [0]),
        ("", "</s>", []),
        ("", "", []),
    ):
        encoder = CausalEncoder(words(tmp_path, start=start, end=end, metaspace=True), 128)
        assert encoder.encode(parts) == [*specials, 2, 3]
    whole = tokenizers.Tokenizer.from_file(str(words(tmp_path, start="<s>", metaspace=True)))
    encoder = CausalEncoder(tmp_path / "tokenizer.json", 128)
    assert encoder.encode(parts) == whole.encode("a great").ids


def test_a_label_word_is_what_follows_a_text_not_what_starts_one(tmp_path: Path) -> None:
    """A SentencePiece tokeniser puts a space before every text."""
    file = words(tmp_path, start="<s>", metaspace=True)
    assert len(tokenizers.Tokenizer.from_file(str(file)).encode(" great").ids) == 3
    encoder = CausalEncoder(file, 128)
    assert encoder.label_ids((" great", "great")) == [[3], [6]]
    assert encoder.continuation(" great movie") == [3, 4]
    with pytest.raises(LabelWordError) as caught:
        encoder.label_ids((" great movie",))
    assert caught.value.tokens == ["\u2581great", "\u2581movie"]
    with pytest.raises(LabelWordError):
        encoder.label_ids(("",))


def test_a_byte_level_label_word_needs_no_text_before_it() -> None:
    causal, cloze = CausalEncoder(TOKENIZER, 128), ClozeEncoder(TOKENIZER, 128)
    label_words = (" great", " terrible", "great", "\n")
    assert causal.label_ids(label_words) == cloze.label_ids(label_words)


def test_a_causal_input_has_no_mask_and_is_not_empty() -> None:
    encoder = CausalEncoder(TOKENIZER, 128)
    with pytest.raises(BackendError, match=r"template has \{mask\}"):
        encoder.encode((Part("field", "x"), Part("mask", "")))
    assert encoder.encode((Part("field", ""),)) == [0]  # RoBERTa's own start.


def test_an_empty_input_needs_a_token_that_starts_a_text(tmp_path: Path) -> None:
    encoder = CausalEncoder(words(tmp_path), 128)
    with pytest.raises(BackendError, match="an input is empty"):
        encoder.encode((Part("field", ""),))


@given(prompt=texts.filter(lambda text: len(text.encode()) < 90), field=texts)
def test_a_causal_input_keeps_all_but_the_end_of_its_field(prompt: str, field: str) -> None:
    ids = CAUSAL.encode(
        (Part("prompt", prompt), Part("text", "["), Part("field", field), Part("text", "] It was")),
        reserve=8,
    )
    assert len(ids) <= 120
    assert ids[0] == 0
    assert not {0, 1, 2, 3, 8191} & set(ids[1:])
    found = re.fullmatch(re.escape(prompt) + r"\[(.*)\] It was", CAUSAL.decode(ids), re.DOTALL)
    assert found
    assert field.startswith(found[1])


def test_what_is_too_long_without_its_fields_is_refused() -> None:
    parts = (Part("prompt", " a" * 120), Part("field", " a" * 50))
    assert len(CAUSAL.encode(parts)) == 128
    assert len(CAUSAL.encode(parts, reserve=7)) == 121
    with pytest.raises(
        BackendError, match="120 tokens without its text fields, but the model takes 119"
    ):
        CAUSAL.encode(parts, reserve=8)


@pytest.mark.parametrize(
    ("stated", "config", "causal", "expected"),
    [
        (None, {"max_position_embeddings": 64, "pad_token_id": None}, True, 64),
        (None, {"n_positions": 1024}, True, 1024),
        (100, {}, False, 100),
        (int(1e30), {"max_position_embeddings": 514, "pad_token_id": 1}, False, 512),
        (512, {"max_position_embeddings": 130}, False, 128),
    ],
)
def test_the_maximum_length(
    tmp_path: Path, stated: int | None, config: object, causal: bool, expected: int
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_max_length(tmp_path, causal=causal) == expected
