"""Runs, bigger blocks and merging equal plain lists of block numbers and a plain sort."""

from functools import partial
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.sim.traces.call import Call, Runs
from keepwarm.sim.traces.coarser import coarse_runs
from keepwarm.sim.traces.merge import Bundle, Opening, merged_calls, merged_sessions, session_of
from keepwarm.sim.traces.runs import Numbers, first_blocks, grown, joined, num_blocks_of, runs_of

PIECES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda p: range(p[0], sum(p))), max_size=8
)


def flat(runs: Runs) -> list[int]:
    return [number for run in runs for number in run]


def is_normal(runs: Runs) -> bool:
    goes_on = any(one.stop == other.start for one, other in pairwise(runs))
    return all(runs) and not goes_on and all(run.step == 1 for run in runs)


@given(PIECES)
def test_joined_pieces_are_the_same_blocks_in_normal_form(pieces: list[range]) -> None:
    runs = joined(pieces)
    assert flat(runs) == flat(tuple(pieces))
    assert is_normal(runs)
    assert runs_of(flat(runs)) == runs


@given(PIECES, st.integers(-1, 40))
def test_first_blocks(pieces: list[range], num_blocks: int) -> None:
    runs = joined(pieces)
    assert flat(first_blocks(runs, num_blocks)) == flat(runs)[: max(0, num_blocks)]
    assert is_normal(first_blocks(runs, num_blocks))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=12), st.integers(1, 16))
def test_a_prompt_keeps_what_it_says_and_the_rest_is_new(
    turns: list[tuple[int, int]], block_size: int
) -> None:
    numbers = Numbers(5)
    runs: Runs = ()
    seen: set[int] = set()
    for num_tokens, num_kept in turns:
        before, runs = runs, grown(runs, num_kept, num_tokens, block_size, numbers)
        blocks = flat(runs)
        num_shared = min(num_kept // block_size, num_tokens // block_size, num_blocks_of(before))
        assert len(blocks) == num_tokens // block_size
        assert blocks[:num_shared] == flat(before)[:num_shared]
        assert not seen & set(blocks[num_shared:])
        assert is_normal(runs)
        seen |= set(blocks)


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of one block tree: equal number, equal prefix."""
    known: list[list[int]] = [[]]
    fresh = 0
    for _ in range(draw(st.integers(1, 10))):
        begun = draw(st.sampled_from(known))
        kept = begun[: draw(st.integers(0, len(begun)))]
        num_new = draw(st.integers(0, 9))
        fresh += draw(st.integers(0, 3))
        known.append([*kept, *range(fresh, fresh + num_new)])
        fresh += num_new
    return known


@given(prompts(), st.integers(2, 5))
def test_big_blocks_share_as_much_as_whole_prefixes_do(tree: list[list[int]], factor: int) -> None:
    coarse = [flat(coarse_runs(runs_of(prompt), factor)) for prompt in tree]
    for prompt, big in zip(tree, coarse, strict=True):
        assert len(big) == len(prompt) // factor
        assert is_normal(coarse_runs(runs_of(prompt), factor))
    prefix_of: dict[int, list[int]] = {}
    for prompt, big in zip(tree, coarse, strict=True):
        for place, number in enumerate(big):
            prefix = prompt[: (place + 1) * factor]
            # One number, one prefix; and one prefix, one number, because the other prompts have it too.
            assert prefix_of.setdefault(number, prefix) == prefix
    assert len({tuple(prefix) for prefix in prefix_of.values()}) == len(prefix_of)


def test_big_blocks_of_a_run_are_a_run() -> None:
    assert len(coarse_runs((range(3, 5000),), 8)) == 1
    assert len(coarse_runs((range(13), range(40, 700)), 8)) == 2


def _same(bundle: Bundle) -> Bundle:
    return bundle


TIMES = st.lists(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=5), max_size=8)


@given(TIMES, st.floats(0, 3))
def test_merging_is_a_stable_sort(times: list[list[float]], early_s: float) -> None:
    everything: list[Call] = []
    openings: list[Opening] = []
    for order, own in enumerate(times):
        calls = tuple(
            Call(session=f"s{order}", at_s=at_s, runs=(), num_prompt_tokens=i, num_output_tokens=0)
            for i, at_s in enumerate(sorted(own))
        )
        everything.extend(calls)
        bundle = Bundle((session_of(calls),), calls)
        openings.append(Opening(calls[0].at_s - early_s, order, partial(_same, bundle)))
    by_start = sorted(openings, key=lambda opening: opening.start_s)
    assert list(merged_calls(by_start)) == sorted(everything, key=lambda call: call.at_s)
    starts = [session.start_s for session in merged_sessions(by_start)]
    assert starts == sorted(own[0] for own in map(sorted, times))
