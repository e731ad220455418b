"""The facts that routing keeps, each against the slow way to know it."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.core.events import AllBlocksCleared, BlockEvent, BlocksRemoved, BlocksStored
from keepwarm.core.ids import DEFAULT_TENANT, RequestId, SessionId, SessionKey, WorkerId
from keepwarm.routing.homes import SessionHomes
from keepwarm.routing.load import WorkerLoad
from keepwarm.routing.prefix_index import PrefixIndex

WORKERS = [WorkerId("a"), WorkerId("b")]
KEYS = [BlockKey(bytes([n]) * 16) for n in range(3)]

some_keys = st.lists(st.sampled_from(KEYS), max_size=6).map(tuple)
tiers = st.sampled_from(Tier)
events: st.SearchStrategy[BlockEvent] = st.one_of(
    st.builds(BlocksStored, some_keys, st.none(), tiers),
    st.builds(BlocksRemoved, some_keys, tiers),
    st.builds(AllBlocksCleared),
)


@given(told=st.lists(st.tuples(st.sampled_from(WORKERS), events), max_size=20), prompt=some_keys)
def test_the_index_holds_what_a_list_of_places_holds(
    told: list[tuple[WorkerId, BlockEvent]], prompt: tuple[BlockKey, ...]
) -> None:
    index = PrefixIndex()
    places: set[tuple[WorkerId, BlockKey, Tier]] = set()
    for worker_id, event in told:
        index.apply(worker_id, event)
        match event:
            case BlocksStored(keys, _, tier):
                places |= {(worker_id, key, tier) for key in keys}
            case BlocksRemoved(keys, tier):
                places -= {(worker_id, key, tier) for key in keys}
            case AllBlocksCleared():
                places = {place for place in places if place[0] != worker_id}
    for worker_id in WORKERS:
        expected: Counter[Tier] = Counter()
        for key in prompt:
            on = [tier for tier in Tier if (worker_id, key, tier) in places]
            if not on:
                break
            expected[on[0]] += 1
        assert index.num_warm_blocks(worker_id, prompt) == dict(expected)
        for tier in Tier:
            held = sum(place[0] == worker_id and place[2] is tier for place in places)
            assert index.num_blocks(worker_id, tier) == held


@dataclass
class Plain:
    """An open request, as it was sent and as it is."""

    num_prompt: int
    num_warm: int
    num_output: int = 0
    has_answered: bool = False


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "tokens", "remove"]),
            st.sampled_from([RequestId(name) for name in "xyz"]),
            st.integers(0, 9),
            st.integers(0, 9),
        ),
        max_size=30,
    )
)
def test_sums_over_open_requests_are_sums(told: list[tuple[str, RequestId, int, int]]) -> None:
    load = WorkerLoad()
    requests: dict[RequestId, Plain] = {}
    for what, name, n, m in told:
        match what:
            case "add":
                load.add(name, n + m, n)
                requests[name] = Plain(n + m, n)
            case "tokens":
                load.on_tokens(name, n, None)
                if name in requests:
                    requests[name].num_output += n
                    requests[name].has_answered = True
            case "remove":
                load.remove(name)
                requests.pop(name, None)
        waiting = [each for each in requests.values() if not each.has_answered]
        assert load.num_open == len(requests)
        assert load.num_running == len(requests) - len(waiting)
        assert load.num_cold_tokens == sum(each.num_prompt - each.num_warm for each in waiting)
        assert load.sum_cold_positions == sum(sum(range(each.num_warm, each.num_prompt)) for each in waiting)
        assert load.num_held_tokens == sum(each.num_prompt + each.num_output for each in requests.values())


sessions = st.sampled_from([(DEFAULT_TENANT, SessionId(name)) for name in "pqrs"])


@given(
    told=st.lists(
        st.tuples(sessions, st.sampled_from([*WORKERS, None]), st.integers(0, 9), st.integers(0, 7)),
        max_size=25,
    )
)
def test_homes_are_those_of_the_last_calls_within_the_bounds(
    told: list[tuple[SessionKey, WorkerId | None, int, int]],
) -> None:
    homes = SessionHomes(max_sessions=3, idle_s=10.0)
    calls: list[tuple[SessionKey, WorkerId, int, int]] = []
    now_s = 0
    for session, worker_id, num_tokens, gap_s in told:
        now_s += gap_s
        homes.expire(now_s)
        calls = [call for call in calls if call[3] >= now_s - 10 and call[0] != session]
        if worker_id:
            homes.settle(session, worker_id, num_tokens, now_s)
            calls = [*calls, (session, worker_id, num_tokens, now_s)][-3:]
        else:
            homes.close(session)
        assert len(homes) == len(calls)
        assert all(homes.of(call[0]) == call[1] for call in calls)
        for each in WORKERS:
            assert homes.num_tokens(each) == sum(call[2] for call in calls if call[1] == each)
