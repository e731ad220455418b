"""Block keys: what must share does, what must not share cannot."""

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import KEY_BYTES, Namespace, extend_chain

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
BASE = Namespace(model="m", block_size=4)


@given(TOKENS, st.integers(1, 8))
def test_only_full_blocks_have_keys(tokens: list[int], block_size: int) -> None:
    root = Namespace(model="m", block_size=block_size).root()
    keys = extend_chain(root, root, tokens, block_size)
    assert [len(key) for key in keys] == [KEY_BYTES] * (len(tokens) // block_size)


@given(TOKENS, st.integers(0, 10))
def test_a_chain_continues_from_any_of_its_keys(tokens: list[int], cut: int) -> None:
    root = BASE.root()
    whole = extend_chain(root, root, tokens, 4)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root
    assert [*whole[:cut], *extend_chain(root, parent, tokens[4 * cut :], 4)] == whole


def test_equal_blocks_after_different_ones_differ() -> None:
    root = BASE.root()
    one = extend_chain(root, root, [1, 2, 3, 4, 9, 9, 9, 9], 4)
    two = extend_chain(root, root, [1, 2, 3, 5, 9, 9, 9, 9], 4)
    assert set(one).isdisjoint(two)


def test_every_part_of_the_namespace_separates() -> None:
    spaces = [
        BASE,
        Namespace(model="m2", block_size=4),
        Namespace(model="m", block_size=4, salt="tenant"),
        Namespace(model="m", block_size=4, adapter="tenant"),
        Namespace(model="m4", block_size=4),
        Namespace(model="", block_size=4, adapter="m"),
    ]
    keys = [extend_chain(space.root(), space.root(), [1, 2, 3, 4], 4)[0] for space in spaces]
    assert len(set(keys)) == len(keys)


def test_the_salt_keys_the_hash_itself() -> None:
    # Even with the same parent, another tenant's content hashes elsewhere: keys cannot be computed or guessed.
    mine = BASE.root()
    theirs = Namespace(model="m", block_size=4, salt="s").root()
    assert extend_chain(mine, mine, [1, 2, 3, 4], 4) != extend_chain(theirs, mine, [1, 2, 3, 4], 4)
