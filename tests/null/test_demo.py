"""The demo's workload and arithmetic; the demo itself is run by people and by the bench."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.cli.demo.agents import TurnRecord, bodies
from keepwarm.cli.demo.call import StreamedCall, Token
from keepwarm.cli.demo.command import demo
from keepwarm.cli.demo.dialogues import HUMAN_PAUSE_S, TOOL_PAUSES_S, load_dialogues
from keepwarm.cli.demo.figures import count_new_tokens, demo_figures, load_figures, new_tokens_of_each
from keepwarm.cli.demo.page import write_page
from keepwarm.cli.demo.processes import Remote
from keepwarm.cli.demo.tier_agents import Answer, Lost
from keepwarm.cli.demo.tier_command import tier_figures
from keepwarm.cli.demo.tier_figures import Story, TierFigures, first_answers
from keepwarm.cli.demo.tier_page import AWAY, LOST, spans_of, write_tier_page
from keepwarm.cli.demo.tiers import Sizes, Told
from keepwarm.core.errors import ConfigurationError


def record(agent: int, turn: int, start_s: float, *, warm: int = 0, host: int = 0) -> TurnRecord:
    return TurnRecord(
        agent=agent,
        turn=turn,
        started_s=start_s,
        first_token_s=start_s + 1.0 + turn,
        ended_s=start_s + 3.0,
        pause_s=0.5,
        num_prompt_tokens=100,
        num_prefilled_tokens=100 - warm - host,
        cached_by_tier={"device": warm, "host": host} if host else {"device": warm},
    )


def test_dialogues_are_recorded_calls_of_tools_with_pauses() -> None:
    dialogues = load_dialogues(8, max_turns=4)
    assert len({dialogue.dialogue_id for dialogue in dialogues}) == 8
    for dialogue in dialogues:
        assert 2 <= len(dialogue.turns) <= 4
        assert dialogue.turns[-1].pause_s == 0
        assert {turn.pause_s for turn in dialogue.turns[:-1]} <= {*TOOL_PAUSES_S, HUMAN_PAUSE_S}
        for earlier, later in zip(dialogue.turns, dialogue.turns[1:], strict=False):
            assert later.messages[: len(earlier.messages)] == earlier.messages
    assert any(message["role"] == "tool" for dialogue in dialogues for message in dialogue.turns[-1].messages)
    assert {"name", "parameters"} <= dialogues[0].tools[0]["function"].keys()
    assert bodies("m", dialogues[0])[0]["messages"] == dialogues[0].turns[0].messages


def test_figures_leave_pauses_out_and_first_turns_out_of_the_first_token() -> None:
    records = [record(0, 0, 0.0), record(0, 1, 4.0, warm=60, host=30), record(1, 0, 1.0), record(1, 1, 6.0)]
    warm = load_figures(records, num_prefilled=330, num_new=300)
    assert warm.prefill_amplification == 1.1
    assert warm.mean_ttft_ms_after_first == 2000.0
    assert warm.mean_task_s == 6.0
    assert warm.reused_tokens == {"device": 60, "host": 30}
    cold = load_figures(records[:2], num_prefilled=900, num_new=300)
    both = demo_figures("m", 2, 4, warm, cold)
    assert (both.ttft_ratio, both.task_ratio) == (1.0, 1.0)


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6))
def test_new_tokens_equal_the_slow_count(prompts: list[list[int]]) -> None:
    seen: set[tuple[int, ...]] = set()
    slow = 0
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            slow += tuple(prompt[:end]) not in seen
            seen.add(tuple(prompt[:end]))
    assert count_new_tokens(prompts) == slow


def test_the_page_is_one_self_contained_file(tmp_path: Path) -> None:
    records = [record(0, 0, 0.0), record(0, 1, 4.0, warm=60, host=30)]
    figures = load_figures(records, num_prefilled=110, num_new=100)
    page = tmp_path / "demo.html"
    write_page(page, demo_figures("m", 1, 2, figures, figures), {"warm": records, "cold": records})
    html = page.read_text()
    assert not re.search(r"<(script|link)[^>]+(src|href)=", html), "nothing is fetched"
    assert "waiting for the first token" in html
    assert json.dumps("prefilled") in html


def test_a_load_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--agents is 0"):
        demo(agents=0)


# ------------------------------------------------------------------ --tiers

TOKENS = (Token("a", b"a", -0.5), Token("b", b"b", -0.25))


def answer(
    agent: int, turn: int, phase: int, start_s: float, tier: str = "", lost: tuple[Lost, ...] = ()
) -> Answer:
    record = TurnRecord(
        agent=agent,
        turn=turn,
        started_s=start_s,
        first_token_s=start_s + 0.5,
        ended_s=start_s + 1.0,
        pause_s=0.25,
        num_prompt_tokens=4,
        num_prefilled_tokens=1 if tier else 4,
        cached_by_tier={tier: 3} if tier else {},
    )
    asked_s = lost[0].started_s if lost else start_s
    return Answer(phase=phase, record=record, asked_s=asked_s, text="ab", tokens=TOKENS, lost=lost)


LOST_CALL = Lost(started_s=2.0, ended_s=3.0, tokens=TOKENS[:1])
ANSWERS = (
    answer(0, 0, 0, 0.0),
    answer(0, 1, 1, 5.0, "disk", (LOST_CALL,)),
    answer(0, 2, 1, 7.0, "host"),
    answer(0, 3, 2, 12.0, "remote"),
)
PROMPTS = [[(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 6, 7), (1, 2, 3, 6, 7)]]
STORY = Story(
    answers=ANSWERS,
    num_prefilled=(5, 1, 2),
    killed_s=3.0,
    ready_again_s=4.5,
    stopped_s=9.0,
    ready_elsewhere_s=11.0,
)


def told(*changed: Answer) -> Told:
    """The reference gives the same answers, but for `changed`."""
    by_place = {answer.place: answer for answer in (*ANSWERS, *changed)}
    slow = [replace(a, record=replace(a.record, first_token_s=a.record.started_s + 2.0)) for a in ANSWERS]
    return Told(
        story=STORY,
        reference=list(by_place.values()),
        cold={1: slow[1:2], 2: slow[3:]},
        remote=Remote("file", "file:///x", "a folder"),
    )


def figures_of(*changed: Answer) -> TierFigures:
    sizes = Sizes(device_tokens=64, host_bytes=1000, reference_tokens=640)
    return tier_figures(told(*changed), PROMPTS, sizes)


def test_each_server_is_charged_for_what_it_prefilled_and_the_prompts_first_sent_to_it() -> None:
    first, second, third = figures_of().phases
    # The lost call's token was new to the first server, which had begun to prefill it.
    assert (first.new_tokens, first.prefilled_tokens, first.prefill_amplification) == (5, 5, 1.0)
    assert (second.new_tokens, second.prefill_amplification, second.resent) == (2, 0.5, 1)
    assert (third.new_tokens, third.prefill_amplification) == (0, 0.0)
    assert second.reused_tokens == {"device": 0, "host": 3, "disk": 3, "remote": 0}
    assert figures_of().reused_tokens == {"device": 0, "host": 3, "disk": 3, "remote": 3}
    assert figures_of().prefill_amplification == round(8 / 7, 4)


def test_a_return_is_the_first_call_that_the_new_server_answered() -> None:
    assert [answer.place for answer in first_answers(ANSWERS, 1)] == [(0, 1)]
    after_kill = figures_of().after_kill
    assert (after_kill.mean_ttft_ms, after_kill.cold_mean_ttft_ms, after_kill.ttft_ratio) == (500, 2000, 4)
    assert after_kill.reused_share == 0.75


def test_one_other_token_anywhere_is_not_identical() -> None:
    assert figures_of().is_identical
    assert figures_of().identical_answers == figures_of().bit_identical_answers == 4
    other_token = replace(ANSWERS[2], tokens=(TOKENS[0], replace(TOKENS[1], data=b"c")))
    assert figures_of(other_token).identical_answers == 3
    assert not figures_of(other_token).is_identical
    assert not figures_of(replace(ANSWERS[2], text="ac")).is_identical


def test_other_bits_are_told_but_are_no_other_token() -> None:
    other_bits = replace(ANSWERS[2], tokens=(TOKENS[0], replace(TOKENS[1], logprob=-0.3)))
    assert figures_of(other_bits).is_identical
    assert figures_of(other_bits).bit_identical_answers == 3


def test_a_call_sent_again_must_begin_with_what_was_streamed_before() -> None:
    assert ANSWERS[1].keeps_what_was_streamed()
    broken = replace(ANSWERS[1], lost=(replace(LOST_CALL, tokens=TOKENS[1:]),))
    assert not broken.keeps_what_was_streamed()


def test_new_tokens_of_each_prompt() -> None:
    assert new_tokens_of_each([(1, 2), (1, 3), (1, 2, 3), (1, 2)]) == [2, 1, 1, 0]


def test_a_stream_is_read_for_text_calls_and_tokens() -> None:
    call = StreamedCall()
    assert not call._add({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    logprobs = {"content": [{"token": "a", "bytes": [97], "logprob": -0.5}]}
    assert call._add({"delta": {"content": "a"}, "logprobs": logprobs, "finish_reason": None})
    tool = {"function": {"name": "find", "arguments": "{}"}}
    assert call._add({"delta": {"tool_calls": [tool]}, "finish_reason": None})
    assert (call.text, call.tokens) == ("afind{}", [TOKENS[0]])


def test_the_timeline_shows_the_lost_call_and_the_wait_for_the_server() -> None:
    spans = list(spans_of(ANSWERS[1]))
    assert spans[:2] == [(LOST, 2.0, 3.0), (AWAY, 3.0, 5.0)]
    assert [start_s for _, start_s, _ in spans[1:]] == [end_s for _, _, end_s in spans[:-1]]


def test_the_page_of_tiers_is_one_self_contained_file(tmp_path: Path) -> None:
    page = tmp_path / "tiers.html"
    write_tier_page(page, figures_of(), STORY)
    html = page.read_text()
    assert not re.search(r"<(script|link)[^>]+(src|href)=", html), "nothing is fetched"
    for word in (LOST, "kill -9, restart", "remote", "4 of 4 answers"):
        assert json.dumps(word)[1:-1] in html


def test_two_turns_are_too_few_for_two_restarts() -> None:
    with pytest.raises(ConfigurationError, match="at least 3"):
        demo(tiers=True, turns=2)
