"""Spans become sessions: equal first messages are equal blocks, dependencies become sessions and sub-agents."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.errors import ConfigurationError
from keepwarm.core.turns import Stop
from keepwarm.sim.traces.call import Session
from keepwarm.sim.traces.otel import read_otel

USER = {"role": "user", "content": "q" * 320}
ANSWER = {"role": "assistant", "content": "The answer of the first call, long enough to be quoted. " * 3}


def span(name: str, start: float, end: float, messages: list[Any], **more: Any) -> dict[str, Any]:
    attributes = {"gen_ai.input.messages": json.dumps(messages), **more.pop("attributes", {})}
    times = [f"2026-02-25T10:00:{second:09.6f}" for second in (start, end)]
    return {
        "trace_id": "t",
        "span_id": name,
        "parent_span_id": None,
        "start_time": times[0],
        "end_time": times[1],
        "attributes": attributes,
        **more,
    }


def sessions_of(tmp_path: Path, *spans: dict[str, Any]) -> list[Session]:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps({"trace_id": "t", "spans": spans}, indent=1))
    return list(read_otel([path]).sessions())


def test_a_prompt_that_begins_with_a_whole_earlier_one_goes_on_with_it(tmp_path: Path) -> None:
    later = {"role": "user", "content": "w" * 160}
    (session,) = sessions_of(tmp_path, span("a", 1, 2, [USER]), span("b", 5, 6, [USER, ANSWER, later]))
    first, second = session.calls
    assert (first.at_s, second.at_s, second.gap_s, second.service_s) == pytest.approx((0, 4, 3, 1))
    assert first.num_prompt_tokens == 80
    assert first.runs == (range(5),)
    assert second.runs[0][:5] == first.runs[0]


def test_side_by_side_calls_are_sub_agents_and_a_quoting_one_waits_for_them(tmp_path: Path) -> None:
    def answered(text: str) -> dict[str, Any]:
        return {"attributes": {"gen_ai.output.text": text * 8}}

    quoting = {"role": "user", "content": "Compare: " + "first result " * 8 + " with " + "second result " * 8}
    root, one, other = sessions_of(
        tmp_path,
        span("plan", 0, 1, [USER], **answered("some plan ")),
        span("one", 2, 4, [{"role": "user", "content": "x" * 99}], **answered("first result ")),
        span("other", 2.5, 5, [{"role": "user", "content": "y" * 99}], **answered("second result ")),
        span("join", 6, 7, [quoting]),
    )
    assert [call.at_s for call in root.calls] == [0.0, 6.0]
    assert [(s.parent, s.workflow, s.blocks_parent) for s in (one, other)] == [
        (root.session, root.session, True)
    ] * 2


def test_a_child_span_goes_on_once_and_then_branches(tmp_path: Path) -> None:
    root, branch = sessions_of(
        tmp_path,
        span("a", 0, 1, [USER]),
        span("b", 2, 3, [{"role": "user", "content": "other"}], parent_span_id="wrap"),
        span("c", 4, 5, [{"role": "user", "content": "third"}], parent_span_id="a"),
        {**span("wrap", 1.5, 3.5, [], parent_span_id="a"), "attributes": {}},
    )
    assert [call.at_s for call in root.calls] == [0.0, 2.0]
    assert (branch.parent, branch.start_s) == (root.session, 4.0)


def test_calls_that_overlap_never_share_a_session(tmp_path: Path) -> None:
    sessions = sessions_of(tmp_path, span("a", 0, 3, [USER]), span("b", 1, 4, [USER, ANSWER, USER]))
    assert [session.parent for session in sessions] == [None, None]


def test_tools_tokens_and_traces(tmp_path: Path) -> None:
    called = [{"role": "assistant", "parts": [{"type": "tool_call", "name": "look", "arguments": "{}"}]}]
    result = {"role": "tool", "content": "found"}
    first = {"gen_ai.output.messages": json.dumps(called), "gen_ai.usage.output_tokens": 17}
    first_calls, second_calls = sessions_of(
        tmp_path,
        span("a", 0, 1, [USER], attributes=first),
        span("b", 2, 3, [USER, *called, result]),
        span("z", 9, 10, [USER], trace_id="u"),
    )
    one, two = first_calls.calls
    assert (one.tools, one.stop, one.num_output_tokens, one.after_tool) == (("look",), Stop.TOOL, 17, False)
    assert (two.stop, two.after_tool) == (Stop.END, True)
    assert second_calls.parent is None
    assert second_calls.calls[0].runs == one.runs


def test_a_file_without_calls_and_a_broken_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no model call"):
        sessions_of(tmp_path, {**span("a", 0, 1, []), "attributes": {}})
    with pytest.raises(ConfigurationError, match=r"span a: gen_ai.input.messages is no list of messages"):
        sessions_of(tmp_path, span("a", 0, 1, [], attributes={"gen_ai.input.messages": "nothing"}))
    (tmp_path / "spans.json").write_text('{"spans": [{"trace_id": "t"}]}')
    with pytest.raises(ConfigurationError, match=r"spans\.json, line 1: .*span_id"):
        read_otel([tmp_path / "spans.json"])
