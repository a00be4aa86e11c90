from __future__ import annotations

import asyncio
import inspect
import math
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk import assets
from fedone_sdk.backends import LOG_ZERO, AnswerCache, ModelClient, Query
from fedone_sdk.backends.completions import (
    Choice,
    Completion,
    Token,
    chosen_label,
    label_log_probs,
    spellings,
)
from fedone_sdk.backends.model_server import Reply
from fedone_sdk.backends.onnx import OnnxBackend
from fedone_sdk.backends.openai import OpenAIBackend
from fedone_sdk.backends.tokens import EstimatedCounter
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendRefused,
    BackendUnavailable,
    FormChanged,
    LabelWordError,
    SpecError,
)
from fedone_sdk.spec import BackendSpec, LimitsSpec, RetrySpec
from fedone_sdk.task import Part, Rendered
from tests.fake_openai import FakeModel, FakeOpenAI, Script

WORDS = (" terrible", " great")
ONE = Usage(requests=1)
TOKENIZER = str(assets.path("roberta_mini") / "tokenizer.json")

Make = Callable[..., OpenAIBackend]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[OpenAIBackend] = []

    def make(server: FakeOpenAI | None, **options: Any) -> OpenAIBackend:
        url = "http://127.0.0.1:9/v1" if server is None else server.base_url
        options = {"model": "fake-1", "base_url": url, "api_key_env": None, **options}
        made.append(OpenAIBackend(**options))
        return made[-1]

    yield make
    for backend in made:
        await backend.aclose()


def ask(text: str = "a fine film", *, prompt: str = "Decide:", **options: Any) -> Query:
    rendered: Rendered = (
        Part("prompt", prompt), Part("text", " "), Part("field", text),
        Part("text", " great or terrible?"),
    )  # fmt: skip
    return Query(**{"inputs": (rendered,), "label_words": WORDS, **options})


TEXT = "Decide: a fine film great or terrible?"
SILENT = 'merged:{{"finish_reason": "{}", "logprobs": null, "message": {{"content": null}}}}'.format


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def expected_row(
    model: FakeModel, words: tuple[str, ...] = WORDS, num_top: int = 20
) -> list[float]:
    """The definition, over the whole distribution and in probabilities."""
    p = {token: math.exp(value) for token, value in model.log_probs(TEXT).items()}
    shown = dict(list(p.items())[:num_top])
    row = []
    for word in words:
        found = [q for token, q in shown.items() if token.strip().lower() == word.strip()]
        bound = min(*shown.values(), 1 - sum(shown.values()) + 1e-6)
        row.append(math.log(sum(found) if found else bound))
    return row


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_label_is_the_sum_of_its_spellings(make: Make, api: str) -> None:
    async with FakeOpenAI() as server:
        answer = await make(server, api=api).score(ask())
    (row,) = answer.log_probs
    assert row == pytest.approx(expected_row(server.model), abs=1e-6)
    assert row == tuple(map(float32, row or ()))
    assert answer.censored == 0
    assert answer.model == "fake-1-2026-01-01 (system_fingerprint fp_fake)"
    sent = server.received[0].prompt_tokens
    assert answer.usage == Usage(requests=1, prompt_tokens=sent, completion_tokens=1)


async def test_the_request_is_as_documented(make: Make) -> None:
    async with FakeOpenAI() as server:
        await make(server, reasoning_effort="none").score(ask())
        await make(server, api="completions").score(ask())
    assert server.received[0].body == {
        "model": "fake-1", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1,
        "temperature": 1, "logprobs": True, "top_logprobs": 20, "reasoning_effort": "none",
    }  # fmt: skip
    assert server.received[1].body == {
        "model": "fake-1", "prompt": TEXT, "max_tokens": 1, "temperature": 1, "logprobs": 20,
    }  # fmt: skip


async def test_a_label_that_is_not_shown_gets_its_bound(make: Make) -> None:
    async with FakeOpenAI() as server:
        # " fine" is no token; "gre" is a token, but only the start of its word.
        answer = await make(server).score(ask(label_words=(" great", " fine", " greatest")))
    (row,) = answer.log_probs
    words = (" great", " fine", " greatest")
    assert row == pytest.approx(expected_row(server.model, words), abs=1e-6)
    assert answer.censored == 2


def rank(log_probs: list[float]) -> list[Token]:
    tokens = [Token(f" w{index}", value) for index, value in enumerate(log_probs)]
    return sorted(tokens, key=lambda token: -token.log_prob)


@given(
    logits=st.lists(st.floats(-30, 5), min_size=22, max_size=60),
    hidden=st.integers(20, 59),
    written=st.integers(0, 19),
)
def test_a_bound_is_never_below_the_truth(logits: list[float], hidden: int, written: int) -> None:
    total = math.log(math.fsum(map(math.exp, logits)))
    tokens = rank([value - total for value in logits])
    absent = tokens[min(hidden, len(tokens) - 1)]
    (value,), censored = label_log_probs(tokens[:20], tokens[written].text, [absent.text.strip()])
    assert censored == 1
    assert value >= float32(absent.log_prob) - 1e-6


def test_a_token_that_is_shown_only_because_it_was_written_bounds_nothing() -> None:
    # As vLLM does: the likeliest but one, and the written one in its place.
    top = [Token("a", math.log(0.6)), Token("b", math.log(0.1)), Token("d", math.log(0.01))]
    hidden = math.log(0.09)
    (value,), _ = label_log_probs(top, "d", ["c"])
    assert hidden <= value == float32(math.log(0.1))
    (value,), _ = label_log_probs(top, "a", ["c"])
    assert value == float32(math.log(0.01))


def test_rounding_does_not_break_the_bound() -> None:
    # An excess over 1 is an error of the shown probabilities, and bounds what is not shown.
    top = [Token("a", math.log(0.7)), Token("b", math.log(0.3001))]
    (value,), censored = label_log_probs(top, "a", ["c"])
    assert (value, censored) == (pytest.approx(math.log(1e-4)), 1)
    (_, hidden), _ = label_log_probs([Token("a", 0.0)], "a", ["a", "b"])
    assert hidden == pytest.approx(math.log(1e-6))
    (sure,), _ = label_log_probs([Token("a", 1e-9)], "a", ["a"])
    assert sure == 0.0


def test_tokens_that_are_not_really_shown_are_not_used() -> None:
    tokens = {"x": -3.0, "y": math.nan, " great": -0.1, " bad": -9999.0}
    shown = [{"token": token, "logprob": value} for token, value in tokens.items()]
    choice = {"logprobs": {"content": [{"token": " great", "top_logprobs": shown}]}}
    completion = Completion.model_validate({"choices": [choice], "system_fingerprint": "fp_1"})
    assert completion.version is None  # Nothing without the name of a model.
    top = completion.choices[0].top()
    assert top == [(" great", -0.1), ("x", -3.0)]
    row, censored = label_log_probs(top, " great", ["great", "bad"])
    assert censored == 1
    assert row[1] == pytest.approx(math.log(1 - math.exp(-0.1) - math.exp(-3)), abs=5e-5)


def test_spellings_of_a_label() -> None:
    for token in (" great", "great", "Great", "GREAT", "\u2581great", "\u0120great"):
        assert label_log_probs([Token(token, -1.0)], token, ["great"]) == ((-1.0,), 0)
    for token in (" gre", "greatest", "great!", " grea"):
        assert label_log_probs([Token(token, -1.0)], token, ["great"])[1] == 1


async def test_the_written_label_counts_for_a_choice(make: Make) -> None:
    async with FakeOpenAI() as server:
        backend = make(server, log_probs=False)
        assert backend.answers == {"choice", "text"}
        answer = await backend.score(ask(want="choice"))
    chosen = server.model.choose(TEXT, ["terrible", "great"])
    expected = (0.0, LOG_ZERO) if chosen == "terrible" else (LOG_ZERO, 0.0)
    assert answer.log_probs == (expected,)
    assert answer.censored == 0
    schema = server.received[0].body["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["properties"]["label"]["enum"] == ["terrible", "great"]
    assert "logprobs" not in server.received[0].body


@pytest.mark.parametrize(
    ("said", "change"),
    [("Multiple candidates is not enabled for this model", "at most 4 answers"),
     *((said, "without a JSON schema")
       for said in ("JSON schema conversion failed", "Structured outputs are not supported",
                    "'x.response_schema'", "Failed to initialize samplers: cannot parse grammar"))],
)  # fmt: skip
async def test_what_a_server_refuses_is_changed(make: Make, said: str, change: str) -> None:
    backend = make(None, log_probs={"samples": 8})
    with pytest.raises(FormChanged, match=change):
        backend._form.adapt(Reply(400, {"error": {"message": said}}, {}), [("user", "x")], 8)


@pytest.mark.parametrize(
    ("vocabulary", "index"), [((" Great",), 1), (("terrible",), 0), (("no",), None)]
)
async def test_a_choice_without_a_schema(
    make: Make, vocabulary: tuple[str, ...], index: int | None
) -> None:
    class OneWord(FakeModel):
        def write(self, text: str, num_tokens: int) -> str:
            return super().write(text, 1)

    async with FakeOpenAI(model=OneWord(vocabulary), takes_schema=False) as server:
        backend = make(server, log_probs=False)
        with pytest.raises(FormChanged, match="without a JSON schema"):
            await backend.score(ask(want="choice"))
        answer = await backend.score(ask(want="choice"))
    assert "response_format" not in server.received[1].body
    row = tuple(0.0 if i == index else LOG_ZERO for i in range(2))
    assert answer.log_probs == (row,)
    assert answer.usage.completion_tokens >= 1  # Paid for, whatever it said.


@pytest.mark.parametrize(
    ("written", "index"),
    [
        ('{"label": "great"}', 0), ('{"label":"Great"}', 0), ("great", 0), (" Great.", 0),
        ('"great"', 0), ("**great**", 0), ("1", 1), ('{"other": "great"}', 0), ("[1]", 1),
        ('{"Label": 1}', 1), ("GREAT!", 0), ("`great`", 0), ("\u201egreat\u201c", 0), ("1)", 1),
        ("```great```", 0), ("```\ngreat\n```", 0), ('```json\n{"label": "great"}\n```', 0),
        ('Here it is:\n```json\n{\n  "label": "great"\n}\n```\nIt is fun.', 0),
        ("Answer: great", 0), ("**Answer:** great.", 0), ("Sentiment\uff1agreat", 0),
        ("The answer is: **great**", 0), ("The sentiment of this is great.", 0),
        ("<think>Is it 1? No: great\n1</think>\n\ngreat", 0), ("Is 1 it?\n</think>great", 0),
        ("<answer>great</answer>", 0), ("\\boxed{great}", 0), ("great\n\nIt praises the film.", 0),
        ("It praises the film.\n\nAnswer: great", 0), ("\uff47reat", 0), ("great\u00a0", 0),
        ("cafe\u0301", 2), ("CAF\u00c9", 2), ('{"label": "\\u00c9pique", "x": 1}', None),
        ('{"label": "caf\\u00e9", "reason": "1"}', 2), ("-1", 3), ("**-1**", 3), (":)", 4),
        ("null", None), ('{"label": null}', None), ('{"label": ""}', None), ("None", None),
        ("great film", None), ("not great", None), ("The answer is not great", None),
        ("great: 1 of 2", 0), ("1) Great.", None), ("1) sports", 1), ("(1) sports", 1),
        ("1. Sports", 1), ("1 - sports", 1), ("-1 - sports", 3), ("great\n1", None),
        ('{"label": "gre', None), ('{"label": "great", "label2": 1}', 0), ("1.5", None),
        ('{"a": "great", "b": "1"}', None), ("great or 1", None),
        ('{"a": ' + "[" * 100_000 + "}", None),
    ],
)  # fmt: skip
def test_what_counts_as_a_written_label(written: str, index: int | None) -> None:
    words = spellings([" great", "1", "caf\u00e9", "-1", ":)"])
    row = tuple(0.0 if i == index else LOG_ZERO for i in range(len(words)))
    assert chosen_label(written, words) == row


def test_the_article_does_not_spell_a_code() -> None:
    words = spellings([" A", " B"])
    top = [Token(" a", math.log(0.5)), Token(" A", math.log(0.3)), Token("A", math.log(0.1))]
    (code, _), censored = label_log_probs(top, " a", words)
    assert (code, censored) == (pytest.approx(math.log(0.4)), 1)
    assert label_log_probs(top, " a", spellings(["a"]))[0][0] == pytest.approx(math.log(0.9))
    assert chosen_label("The answer is a.", words) == (0.0, LOG_ZERO)


@pytest.mark.parametrize("written", ["", "  ", "<think>It may be great", "<think>1</think>\n"])
def test_nothing_written_is_no_answer(written: str) -> None:
    assert chosen_label(written, ["great", "1"]) is None


def shown(*top: tuple[str, float] | tuple[str, float, list[int]]) -> Choice:
    rows = [
        {"token": text, "logprob": math.log(p), "bytes": more[0] if more else None}
        for text, p, *more in top
    ]
    first = {"token": top[0][0], "logprob": math.log(top[0][1]), "top_logprobs": rows}
    return Choice.model_validate({"logprobs": {"content": [first, None]}})


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        # The sampled token is listed again, with its bytes, without them, and rounded.
        ([("no", 0.55, [110, 111]), ("yes", 0.4, [1]), ("no", 0.5, [110, 111])], (0.55, 0.4)),
        ([("no", 0.55), ("yes", 0.4), ("no", 0.55)], (0.55, 0.4)),
        ([("no", 0.55), ("yes", 0.4), ("no", 0.5499)], (0.55, 0.4)),
        # Other spellings are other tokens, also where the server shows them by one text.
        ([("yes", 0.4), (" yes", 0.1), ("No", 0.3), ("no", 0.1)], (0.4, 0.5)),
        ([("yes", 0.4), ("yes", 0.1), ("no", 0.3)], (0.3, 0.5)),
        ([("no", 0.3, [110]), ("no", 0.3, [32, 110]), ("yes", 0.1, [1])], (0.6, 0.1)),
        # Bytes of a character that spell nothing.
        ([("\ufffd", 0.4, [226]), ("\ufffd", 0.3, [240]), ("no", 0.2), ("yes", 0.1)], (0.2, 0.1)),
    ],
)
def test_a_token_counts_once(top: list[Any], expected: tuple[float, ...]) -> None:
    tokens = shown(*top).top()
    row, censored = label_log_probs(tokens or (), top[0][0], ["no", "yes"])
    assert [math.exp(value) for value in row] == pytest.approx(expected, abs=1e-6)
    assert censored == 0


@pytest.mark.parametrize(
    "top", [[("no", 0.55), ("yes", 0.4), (" no", 0.55)], [("no", 3.0)], [("a", 0.7), ("b", 0.4)]]
)
def test_an_impossible_mass_is_no_number(top: list[Any]) -> None:
    with pytest.raises(ValueError, match="add up to"):
        label_log_probs(shown(*top).top() or (), None, ["no", "yes"])


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_text_is_written(make: Make, api: str) -> None:
    async with FakeOpenAI() as server:
        answer = await make(server, api=api).score(ask(want="text", label_words=(), max_tokens=5))
    assert answer.texts == (server.model.write(TEXT, 5),)
    assert answer.log_probs == ((),)
    assert answer.usage.completion_tokens <= 5


@pytest.mark.parametrize(
    "behaviour", ["filtered", "refused", "empty", *map(SILENT, ("SAFETY", "tool_calls", "stop"))]
)
async def test_an_input_that_fails_is_none(make: Make, behaviour: str) -> None:
    async with FakeOpenAI(script=Script(default=behaviour)) as server:
        labels = await make(server).score(ask())
        assert labels.log_probs == (None,)
        assert labels.usage.requests == 1
        if behaviour != "empty":
            choice = await make(server, log_probs=False).score(ask(want="choice"))
            assert choice.log_probs == (None,)
            text = await make(server).score(ask(want="text", max_tokens=3))
            assert (text.log_probs, text.texts) == ((None,), (None,))


async def test_a_usage_that_is_missing_is_the_quote(make: Make) -> None:
    async with FakeOpenAI(script=Script(default="no_usage")) as server:
        backend = make(server)
        quoted = await backend.quote(ask())
        answer = await backend.score(ask())
    assert answer.usage == quoted.without_queries()
    assert answer.usage.prompt_tokens > 0
    async with FakeOpenAI(bills=lambda _, tokens: (tokens, (tokens[0], 4))) as server:
        backend = make(server, log_probs={"samples": 3}, tokenizer=TOKENIZER)
        answer = await backend.score(ask(want="counts", samples=3))
    assert answer.usage.completion_tokens == 3 * 64  # llama.cpp's server reports one answer's.


async def test_a_quote_covers_the_schema(make: Make) -> None:
    backend = make(None, log_probs=False)
    plain = await make(None).quote(ask())
    quoted = await backend.quote(ask(want="choice"))
    assert quoted.prompt_tokens - plain.prompt_tokens > len('"enum": ["terrible", "great"]')
    assert quoted.beyond(backend.worst_case(1)) == NOTHING
    long = await backend.quote(ask("x" * 5000, want="choice"))
    assert long.prompt_tokens == backend.worst_case(1).prompt_tokens


async def test_a_long_input_loses_the_end_of_its_field(make: Make) -> None:
    async with FakeOpenAI() as server:
        await make(server, max_input_tokens=40).score(ask("word " * 100))
    sent = server.received[0].body["messages"][0]["content"]
    assert len(sent.encode()) in (79, 80)  # 40 tokens
    assert sent.startswith("Decide: word ")
    assert sent.endswith(" great or terrible?")


async def test_what_is_refused_before_it_is_sent(make: Make) -> None:
    backend = make(None)
    with pytest.raises(ValueError, match="one input"):
        await backend.score(Query(inputs=ask().inputs * 2, label_words=WORDS))
    with pytest.raises(ValueError, match="log_probs"):
        make(None, api="completions", log_probs=False)
    for words in ((" great", "Great"), (" yes", "yes ")):
        with pytest.raises(SpecError, match="are the same word"):
            await backend.check(words)
        with pytest.raises(SpecError, match="are the same word"):
            await backend.score(ask(label_words=words))


async def test_a_label_of_several_tokens_is_named(make: Make) -> None:
    async with FakeOpenAI() as server:
        await make(server, tokenizer=TOKENIZER).check(WORDS)
        with pytest.raises(LabelWordError, match="antidis") as caught:
            await make(server, tokenizer=TOKENIZER).check((" great", " antidisestablishment"))
        assert len(caught.value.tokens) > 1
        # Unknown without a tokeniser; a written answer may have several tokens.
        await make(server).check((" great", " antidisestablishment"))
        without = make(server, tokenizer=TOKENIZER, log_probs=False)
        await without.check((" great", " antidisestablishment"))
        assert not server.received


async def test_limits_are_passed_on(make: Make) -> None:
    async with FakeOpenAI(requests_per_minute=10, tokens_per_minute=1000) as server:
        answer = await make(server).score(ask())
    assert answer.limits is not None
    assert (answer.limits.requests, answer.limits.requests_reset_s) == (9, 60)
    assert answer.limits.tokens == 1000 - answer.usage.prompt_tokens - 1


# What the server wants


async def test_the_limit_of_tokens_is_called_as_the_server_calls_it(make: Make) -> None:
    async with FakeOpenAI(max_name="max_completion_tokens") as server:
        backend = make(server)
        with pytest.raises(FormChanged, match="max_completion_tokens") as caught:
            await backend.score(ask())
        assert caught.value.usage == ONE
        await backend.score(ask())
        await backend.score(ask())
    assert ["max_tokens" in received.body for received in server.received] == [True, False, False]
    assert server.received[2].body["max_completion_tokens"] == 1


async def test_written_answers_are_not_random_where_the_model_allows_it(make: Make) -> None:
    written = (
        ask(want="text", label_words=(), max_tokens=3),
        ask(want="choice", label_words=("yes", "no")),
    )
    async with FakeOpenAI() as server:
        for query in (*written, ask()):
            await make(server, log_probs=query.want == "labels").score(query)
    assert [received.body["temperature"] for received in server.received] == [0, 0, 1]
    async with FakeOpenAI(temperature=1) as server:
        backend = make(server)
        with pytest.raises(BackendUnavailable, match="written answers are random"):
            await backend.score(written[0])
        await backend.score(written[0])
    assert "temperature" not in server.received[-1].body


async def test_openai_itself_gets_the_newer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    async with OpenAIBackend("gpt-4.1-nano") as backend:
        body = backend._form.body(ask(), [("user", "x")], 1, None)
        assert body["max_completion_tokens"] == 1
        assert body["service_tier"] == "default"  # A project's own may be dearer.
        assert backend.fingerprint == "openai:api.openai.com:gpt-4.1-nano"
        # Their frame is known; that of others is not.
        assert backend.worst_case(1).prompt_tokens == 1024 + 16


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_server_that_shows_five_tokens_is_asked_for_five(make: Make, api: str) -> None:
    async with FakeOpenAI(max_top=5) as server:
        backend = make(server, api=api)
        with pytest.raises(BackendUnavailable, match="at most 5 tokens") as caught:
            await backend.score(ask())
        assert caught.value.usage == ONE
        answer = await backend.score(ask())
    assert answer.log_probs[0] == pytest.approx(expected_row(server.model, num_top=5), abs=1e-6)


@pytest.mark.parametrize("log_probs", ["left_out", "forbidden", "unsupported"])
async def test_no_log_probs_cost_one_request_and_block_until_reset(
    make: Make, log_probs: Any
) -> None:
    async with FakeOpenAI(log_probs=log_probs, latency_s=0.01) as server:
        backend = ModelClient(make(server), retry=RetrySpec())
        calls = [backend.score(ask(str(index))) for index in range(50)]
        failures: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        assert len(server.received) == 1
        for failure in failures:
            assert isinstance(failure, BackendBlocked)
            assert "shows no log-probabilities: set log_probs: false" in str(failure)
        assert sum(failure.usage.requests for failure in failures) == 1
        server.log_probs = "shown"
        backend.reset()
        assert (await backend.score(ask())).log_probs[0] is not None


async def test_log_probs_may_be_left_out_once(make: Make) -> None:
    """llama.cpp's server does, if the sampled token ends inside a character."""
    half = 'merged:{"logprobs": null, "message": {"content": "\ufffd"}}'
    async with FakeOpenAI(script=Script({1: half})) as server:
        backend = make(server)
        with pytest.raises(BackendUnavailable, match="an answer without log-prob"):
            await backend.score(ask())
        assert (await backend.score(ask())).log_probs[0] is not None
    async with FakeOpenAI(script=Script({2: "no_log_probs"})) as server:
        backend = make(server)
        await backend.score(ask())
        with pytest.raises(BackendUnavailable, match="without log-prob") as caught:
            await backend.score(ask())
        assert caught.value.usage is not None
        assert caught.value.usage.completion_tokens == 1


async def test_an_input_is_tokenised_once(make: Make) -> None:
    class Counted(EstimatedCounter):
        texts: ClassVar[list[str]] = []

        def spans(self, text: str) -> list[tuple[int, int]]:
            self.texts.append(text)
            return super().spans(text)

    async with FakeOpenAI() as server:
        adapter = make(server)
        adapter._counter = Counted()
        limits = LimitsSpec(tokens_per_minute=1e6)
        backend = ModelClient(adapter, cache=AnswerCache(), retry=RetrySpec(), limits=limits)
        assert (await backend.quote(ask())).prompt_tokens
        await backend.score(ask())
        assert Counted.texts == [TEXT]


@pytest.mark.parametrize("behaviour", ["reasons", SILENT("length")])
async def test_a_model_that_only_reasons_is_named(make: Make, behaviour: str) -> None:
    async with FakeOpenAI(script=Script(default=behaviour)) as server:
        for want in ("choice", "text"):
            with pytest.raises(BackendRefused, match="reasoning_effort: none") as caught:
                await make(server, log_probs=False).score(ask(want=want, max_tokens=64))
            usage = caught.value.usage or NOTHING
            assert usage.completion_tokens == server.received[-1].completion_tokens


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [("html", BackendUnavailable), ("bad_key", BackendBlocked), ("too_long", BackendRefused),
     ("filtered_prompt", BackendRefused), ("forbidden", BackendRefused)],
)  # fmt: skip
async def test_a_failure_is_of_its_kind_and_does_not_last(
    make: Make, behaviour: str, kind: type[BackendError]
) -> None:
    async with FakeOpenAI(script=Script({1: behaviour})) as server:
        backend = make(server)
        with pytest.raises(BackendError) as caught:
            await backend.score(ask())
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
        await backend.score(ask())  # It can continue.
        assert len(server.received) == 2


@pytest.mark.parametrize(
    "body",
    [b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"logprobs": 3, "message": "no"}]}', b"",
     b'\xef\xbb\xbf{"choices": null, "base_resp": {"status_code": 1008, "status_msg": "no"}}'],
)  # fmt: skip
async def test_an_answer_of_another_shape_is_a_clear_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    async def send(self: FakeOpenAI, *arguments: object) -> Any:
        from aiohttp import web

        return web.Response(body=body, content_type="application/json")

    monkeypatch.setattr(FakeOpenAI, "_send", send)
    async with FakeOpenAI() as server:
        with pytest.raises(BackendUnavailable, match="not a completion") as caught:
            await make(server).score(ask())
    assert caught.value.usage is None
    assert caught.value.said[:2] == {b"{": "ch", b"\xef": "no"}.get(body[:1], "")


# Its name


@pytest.mark.parametrize(
    ("settings", "ending"),
    [
        ({}, ""), ({"max_input_tokens": 1024, "api": "chat"}, ""),
        ({"max_input_tokens": 16}, ":max_input_tokens=16"),
        ({"api": "completions"}, ":api=completions"),
        ({"reasoning_effort": "low"}, ":reasoning_effort=low"),
        ({"log_probs": False}, ""), ({"timeout_s": 5.0}, ""),
        ({"api": "completions", "max_input_tokens": 16}, ":api=completions,max_input_tokens=16"),
    ],
)  # fmt: skip
def test_settings_that_move_scores_are_in_the_fingerprint(
    make: Make, settings: dict[str, Any], ending: str
) -> None:
    assert make(None, **settings).fingerprint == f"openai:127.0.0.1:9:fake-1{ending}"


LONG = "a fine film about the strap of a bag that broke on the second day " * 4


@pytest.mark.parametrize(
    ("text", "settings", "num_requests"),
    [
        (LONG, [{}, {"tokenizer": TOKENIZER}], 2),  # Cut by the tokeniser that is at hand.
        (LONG, [{}, {}], 1),
        ("fine", [{}, {"tokenizer": TOKENIZER}], 1),
        (LONG, [{"max_input_tokens": 40}, {"max_input_tokens": 1024}] * 2, 2),
        ("fine", [{}, {"reasoning_effort": "none"}, {"api": "completions"}] * 2, 3),
    ],
    ids=["two cuts", "one cut", "nothing cut", "cut and whole", "settings"],
)
async def test_a_cache_is_shared_by_those_who_send_the_same(
    make: Make, tmp_path: Path, text: str, settings: list[dict[str, Any]], num_requests: int
) -> None:
    async with FakeOpenAI() as server:
        for options in settings:
            backend = make(server, **{"max_input_tokens": 48, **options})
            async with ModelClient(backend, cache=AnswerCache(tmp_path / "answers")) as cached:
                await cached.score(ask(text))
                assert (await cached.score(ask(text))).cached
                assert await cached.quote(ask(text)) == Usage(queries=1)
        assert len(server.received) == num_requests
        assert len({str(received.body) for received in server.received}) == num_requests


# check


async def test_a_model_is_there_or_it_is_named_with_its_neighbours(make: Make) -> None:
    models: dict[str, dict[str, object]] = {"gpt-4.1-nano": {}, "gpt-4.1-mini": {}, "org/m": {}}
    async with FakeOpenAI(models=models) as server:
        backend = make(server, model="org/m")
        await backend.check(WORDS)
        assert backend.fingerprint == f"openai:{server.base_url[7:-3]}:org/m"
        with pytest.raises(BackendBlocked, match=r"'gpt-4\.1-nan' does not exist.*gpt-4\.1-nano"):
            await make(server, model="gpt-4.1-nan").check(WORDS)
        assert not server.received


async def test_a_server_that_has_only_the_list_is_asked_for_that(make: Make) -> None:
    models: dict[str, dict[str, object]] = {"fake-1": {}, "/a.gguf": {"aliases": ["mine", "a/*"]}}
    async with FakeOpenAI(models=models, lists_models="list") as server:
        for name in ("fake-1", "mine", "fake-1:nitro", "a/b"):
            await make(server, model=name).check(WORDS)
        deployment = make(server, model="b")
        deployment._host = "name.openai.azure.com"
        await deployment.check(WORDS)
        with pytest.raises(BackendBlocked, match="does not exist"):
            await make(server, model="b").check(WORDS)
        assert "/v1/models" in server.asked
    async with FakeOpenAI(lists_models=False) as server:
        await make(server).check(WORDS)


async def test_two_files_under_one_name_share_no_cache(make: Make, tmp_path: Path) -> None:
    def listed(size: int) -> dict[str, dict[str, object]]:
        return {"fake-1": {"meta": {"n_params": 10, "size": size, "ftype": "Q4_1", "n_ctx": 8192}}}

    cache = tmp_path / "answers.db"
    fingerprints, asked = [], []
    async with FakeOpenAI() as server:
        for size in (100, 200, 100):
            server.models = listed(size)
            backend = ModelClient(make(server), cache=AnswerCache(cache))
            await backend.check(WORDS)
            fingerprints.append(backend.fingerprint)
            await backend.score(ask())
            asked.append(len(server.received))
            await backend.aclose()
    assert fingerprints[0].endswith(":fake-1:n_params=10,size=100,ftype=Q4_1")
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
    assert asked == [1, 2, 2]


async def test_a_wrong_key_is_seen_before_anything_is_paid(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-wrong-0123456789")
    async with FakeOpenAI(key="sk-right") as server:
        with pytest.raises(BackendBlocked, match="the key is in MY_KEY") as caught:
            await make(server, api_key_env="MY_KEY").check(WORDS)
        assert not server.received
    assert "sk-wrong" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "adapter"), [("openai", OpenAIBackend), ("vllm", VllmBackend), ("onnx", OnnxBackend)]
)
def test_the_options_are_those_of_the_spec(kind: str, adapter: type[Any]) -> None:
    given = {"kind": kind} if kind == "onnx" else {"kind": kind, "model": "m"}
    options = BackendSpec.model_validate(given).adapter_options
    found = inspect.signature(adapter).parameters
    assert set(found) == set(options)
    for name in options.keys() - {"model"}:
        assert found[name].default == options[name], name
