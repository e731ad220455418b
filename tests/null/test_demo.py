"""The demo's workload and arithmetic; the demo itself is run by people and by the bench."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.cli.demo.agents import TurnRecord, bodies
from keepwarm.cli.demo.dialogues import HUMAN_PAUSE_S, TOOL_PAUSES_S, load_dialogues
from keepwarm.cli.demo.figures import count_new_tokens, demo_figures, load_figures
from keepwarm.cli.demo.page import write_page


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
    from keepwarm.cli.demo.command import demo
    from keepwarm.core.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="--agents is 0"):
        demo(agents=0)
