"""Laws of reading a turn: how the stream was cut never matters, and nothing is lost."""

import itertools
import json
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.gateway.text.conversation import ToolSpec
from keepwarm.gateway.text.events import (
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    TurnEvent,
)
from keepwarm.gateway.text.model import TextModel
from keepwarm.gateway.text.parsers.base import ToolParser
from keepwarm.gateway.text.parsers.registry import TOOL_FORMATS
from keepwarm.gateway.text.stops import StopMatcher
from keepwarm.testing.text import byte_text_assets

MODEL = TextModel(byte_text_assets())
TOOL = ToolSpec("f", "", {})

_words = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "<",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        '{"name": "f", "arguments": {}}',
        *['"name"', '"arguments"', "null", "1", " ", "\n", "é", "🙂", "text", "</"],
    ]
)
_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_arguments = st.dictionaries(st.text(max_size=5), _json_values, max_size=3)
_plain = st.text(st.characters(exclude_characters="< \t\r\n", exclude_categories=["Cs"]), min_size=1)


def _cuts(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text) + 1)))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def _numbered() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def _joined(events: Sequence[TurnEvent]) -> list[TurnEvent]:
    joined: list[TurnEvent] = []
    for event in events:
        if isinstance(event, TextDelta) and joined and isinstance(joined[-1], TextDelta):
            joined[-1] = TextDelta(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def _run(parser: ToolParser, pieces: Sequence[str]) -> list[TurnEvent]:
    return _joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(_words).map("".join), st.data())
@settings(deadline=None, max_examples=300)
def test_cuts_never_matter_to_a_parser(name: str, text: str, data: st.DataObject) -> None:
    make = TOOL_FORMATS[name].make_parser
    whole = _run(make(_numbered()), [text])
    assert _run(make(_numbered()), _cuts(text, data)) == whole
    assert _run(make(_numbered()), list(text)) == whole
    if all(isinstance(event, TextDelta) for event in whole):
        assert whole == ([TextDelta(text)] if text else [])


@given(
    st.lists(_plain | st.tuples(st.sampled_from("fgh"), _arguments, st.booleans(), st.booleans())), st.data()
)
@settings(deadline=None)
def test_calls_between_texts_are_all_found_with_their_own_characters(
    parts: list[str | tuple[str, dict[str, object], bool, bool]], data: st.DataObject
) -> None:
    text = ""
    expected: list[TurnEvent] = []
    index = 0
    for part in parts:
        if isinstance(part, str):
            text += part
            expected.append(TextDelta(part))
            continue
        name, value, compact, as_list = part
        arguments = json.dumps(value, separators=(",", ":") if compact else None, ensure_ascii=compact)
        call = f'{{"name": "{name}", "arguments": {arguments}}}'
        text += f"\n<tool_call>{f'[{call}]' if as_list else call}</tool_call>"
        expected += [
            ToolCallStarted(index, f"id{index}", name),
            ToolCallArguments(index, arguments),
            ToolCallEnded(index),
        ]
        index += 1
    parser = TOOL_FORMATS["hermes"].make_parser(_numbered())
    assert _run(parser, _cuts(text, data)) == _joined(expected)


def _first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The slow reference: try every end in turn."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text("ab", max_size=30), st.lists(st.text("ab", max_size=5), max_size=4), st.data())
@settings(deadline=None, max_examples=300)
def test_stop_strings_match_the_slow_reference(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    seen = ""
    for piece in _cuts(text, data):
        shown += matcher.feed(piece)
        seen += piece
        if matcher.stopped_by is None:
            # Held back is only what a stop string could still begin with.
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    shown += matcher.finish()
    assert (shown, matcher.stopped_by) == _first_stop(text, stops)


@given(st.lists(st.integers(0, MODEL.vocab_size + 3), max_size=40), st.data())
@settings(deadline=None)
def test_tokens_read_one_by_one_are_the_decoded_answer(ids: list[int], data: st.DataObject) -> None:
    reader = MODEL.start_turn()
    events = [event for i in ids for event in reader.feed([i])] + reader.finish()
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == MODEL.decode(ids)
    assert reader.num_tokens_used == len(ids)


@given(
    st.lists(_words).map("".join), st.lists(st.text("<}\n🙂f", min_size=1, max_size=3), max_size=2), st.data()
)
@settings(deadline=None)
def test_cuts_between_tokens_never_matter_to_a_reader(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = MODEL.encode(text)
    outcomes = []
    for ends in (
        [len(ids)],
        range(1, len(ids) + 1),
        sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {len(ids)}),
    ):
        model = TextModel(byte_text_assets(), call_ids=_numbered())
        reader = model.start_turn(stop=stops, tools=(TOOL,))
        events: list[TurnEvent] = []
        start = 0
        for end in ends:
            events += reader.feed(ids[start:end])
            start = end
        outcomes.append((_joined(events + reader.finish()), reader.stopped_by, reader.num_tokens_used))
    assert outcomes[0] == outcomes[1] == outcomes[2]
