"""How much of a prompt was there before, and that a recorded run can be read again."""

from hashlib import blake2b
from pathlib import Path

from golden_workloads import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import BlockKey
from keepwarm.core.ids import DEFAULT_TENANT, SessionId, SessionKey, TenantId
from keepwarm.core.turns import Stop
from keepwarm.sim.traces.decisions import read_decisions
from keepwarm.workflow.overlap import STRIDE, LatestPrompts, Overlap

A: SessionKey = (DEFAULT_TENANT, SessionId("a"))
B: SessionKey = (DEFAULT_TENANT, SessionId("b"))
C: SessionKey = (TenantId("other"), SessionId("a"))


def keys(*parts: tuple[int, int]) -> list[BlockKey]:
    """Keys of a chain; a part is (which content, how many blocks). Equal beginnings give equal keys."""
    chain = [content for content, count in parts for _ in range(count)]
    return [
        BlockKey(blake2b(bytes(chain[: index + 1]), digest_size=16).digest()) for index in range(len(chain))
    ]


def test_a_prompt_that_goes_on_shares_all_of_the_last_one() -> None:
    prompts = LatestPrompts()
    assert prompts.take(A, None, keys((1, 7))) == Overlap(0, None)
    assert prompts.take(A, None, keys((1, 7), (2, 5))) == Overlap(7, A)
    assert prompts.take(A, None, keys((1, 7), (2, 5))) == Overlap(12, A)


def test_an_edit_is_found_within_a_stride() -> None:
    prompts = LatestPrompts()
    prompts.take(A, None, keys((1, 30)))
    found = prompts.take(A, None, keys((1, 21), (3, 20)))
    assert found == Overlap(21 // STRIDE * STRIDE, A)


def test_a_child_shares_with_its_parent_and_a_stranger_with_who_began_alike() -> None:
    prompts = LatestPrompts()
    prompts.take(A, None, keys((1, 20)))
    assert prompts.take(B, A, keys((1, 20), (2, 4))) == Overlap(20, A)
    stranger: SessionKey = (DEFAULT_TENANT, SessionId("stranger"))
    assert prompts.take(stranger, None, keys((1, 12), (9, 9))) == Overlap(12, B)
    assert prompts.take(C, None, keys((1, 12))) == Overlap(0, None), "another tenant's sessions are not named"


def test_prompts_of_few_blocks_and_of_none() -> None:
    prompts = LatestPrompts()
    assert prompts.take(A, None, []) == Overlap(0, None)
    assert prompts.take(A, None, keys((1, 1))) == Overlap(0, None)
    assert prompts.take(A, None, keys((1, 3))) == Overlap(1, A)


def test_old_sessions_are_forgotten() -> None:
    prompts = LatestPrompts(max_sessions=2)
    for name in "abc":
        prompts.take((DEFAULT_TENANT, SessionId(name)), None, keys((ord(name), 8)))
    assert prompts.take((DEFAULT_TENANT, SessionId("a")), None, keys((ord("a"), 9))) == Overlap(0, None)
    assert prompts.take((DEFAULT_TENANT, SessionId("c")), None, keys((ord("c"), 9))).num_blocks == 8


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_never_more_than_the_truth_and_less_by_a_stride_at_most(shared: int, old: int, new: int) -> None:
    prompts = LatestPrompts()
    prompts.take(A, None, keys((1, shared), (2, old)))
    found = prompts.take(A, None, keys((1, shared), (3, new))).num_blocks
    assert shared - STRIDE < found <= shared


def test_a_recorded_run_can_be_read_again(tmp_path: Path) -> None:
    for name, golden in GOLDEN.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(golden.lines()) + "\n")
        arrivals = golden.arrivals()
        workload = read_decisions(path, block_size=4)
        calls = list(workload.calls())
        assert [call.at_s for call in calls] == [round(arrival.at_s, 6) for arrival in arrivals]
        assert [call.num_prompt_tokens for call in calls] == [len(a.draft.token_ids) for a in arrivals]
        assert [(call.stop, call.tools) for call in calls] == [(a.stop, a.tools) for a in arrivals]
        assert all(call.num_output_tokens > 0 for call in calls)
    fork = {session.session: session for session in read_decisions(tmp_path / "fork.jsonl").sessions()}
    assert (fork["one"].parent, fork["two"].workflow) == ("root", "root")
    assert fork["root"].calls[0].stop is Stop.TOOL
    assert fork["one"].calls[0].runs[0] == fork["root"].calls[0].runs[0], "it shares its parent's prompt"
