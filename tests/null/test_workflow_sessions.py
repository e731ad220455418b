"""Which conversation a request belongs to."""

import itertools

from keepwarm.core.blocks import Namespace, extend_chain
from keepwarm.core.ids import RequestId, TenantId
from keepwarm.core.request import SessionRef, SessionSource
from keepwarm.workflow.draft import ClaimedIdentity
from keepwarm.workflow.lineage import PromptTrail
from keepwarm.workflow.sessions import SessionTable

BLOCK = 4
NOBODY = ClaimedIdentity()


class World:
    def __init__(self, **limits: int) -> None:
        ids = itertools.count(1)
        self.table = SessionTable(new_id=lambda: f"s{next(ids)}", **limits)

    def ask(
        self, tokens: list[int], identity: ClaimedIdentity = NOBODY, tenant: str = "t", salt: str = ""
    ) -> SessionRef:
        root = Namespace(model="m", block_size=BLOCK, salt=salt).root()
        trail = PromptTrail(
            root=root, keys=extend_chain(root, root, tokens, BLOCK), token_ids=tokens, block_size=BLOCK
        )
        decision = self.table.resolve(RequestId("r"), identity, trail, tenant_id=TenantId(tenant), now_s=0.0)
        return decision.choice


def test_a_prompt_that_extends_the_last_one_belongs_to_it() -> None:
    world = World()
    first = world.ask([1, 2, 3, 4, 5, 6])
    second = world.ask([1, 2, 3, 4, 5, 6, 7, 8, 9])
    third = world.ask([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
    assert first.source is SessionSource.NEW
    assert {first.session_id, second.session_id, third.session_id} == {"s1"}
    assert (third.source, third.confidence < 1) == (SessionSource.LINEAGE, True)


def test_short_prompts_have_a_lineage_too() -> None:
    world = World()
    assert world.ask([1, 2]).session_id == world.ask([1, 2, 3]).session_id
    assert world.ask([9]).session_id == "s2"


def test_agents_that_share_a_system_prompt_are_told_apart_inside_the_block() -> None:
    world = World()
    world.ask([1, 2, 3, 4, 5])
    other = world.ask([1, 2, 3, 4, 6])
    assert (other.session_id, other.source) == ("s2", SessionSource.NEW)
    assert world.ask([1, 2, 3, 4, 5, 7, 7, 7]).session_id == "s1"
    assert world.ask([1, 2, 3, 4, 6, 7, 7, 7]).session_id == "s2"


def test_branching_off_an_earlier_prompt_is_a_fork_in_the_same_workflow() -> None:
    world = World()
    world.ask([1, 2, 3, 4, 5])
    world.ask([1, 2, 3, 4, 5, 6, 7, 8, 9])
    fork = world.ask([1, 2, 3, 4, 5, 20, 21, 22])
    assert (fork.session_id, fork.parent_session_id, fork.workflow_id) == ("s2", "s1", "s1")
    assert world.ask([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).session_id == "s1"


def test_what_the_client_says_wins() -> None:
    world = World()
    world.ask([1, 2, 3, 4, 5])
    named = ClaimedIdentity(session_id="mine", parent_session_id="boss", source=SessionSource.HEADER)
    ref = world.ask([1, 2, 3, 4, 5, 6], named)
    assert (ref.session_id, ref.parent_session_id, ref.workflow_id) == ("mine", "boss", "boss")
    assert (ref.source, ref.confidence) == (SessionSource.HEADER, 1.0)
    assert world.ask([1, 2, 3, 4, 5, 6, 7]).session_id == "mine", "and later requests may leave the name out"


def test_tenants_are_never_mixed() -> None:
    world = World()
    world.ask([1, 2, 3, 4, 5], tenant="a")
    assert world.ask([1, 2, 3, 4, 5, 6], tenant="b").source is SessionSource.NEW
    assert world.ask([1, 2, 3, 4, 5, 6], tenant="a", salt="x").source is SessionSource.NEW
    named = ClaimedIdentity(session_id="same", source=SessionSource.HEADER)
    world.ask([1], named, tenant="a")
    world.ask([2], named, tenant="b")
    assert len(world.table) == 5


def test_the_table_forgets_the_longest_unused_and_final_sessions() -> None:
    world = World(max_sessions=2, max_marks=2)
    world.ask([1])
    world.ask([2])
    world.ask([1, 1])
    world.ask([3])
    assert len(world.table) == 2
    assert world.ask([1, 1, 1]).session_id == "s1"
    assert world.ask([2, 2]).source is SessionSource.NEW
    final = ClaimedIdentity(session_id="end", is_final=True, source=SessionSource.HEADER)
    world.ask([7], final)
    assert world.ask([7, 7]).source is SessionSource.NEW
