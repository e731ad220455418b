"""Random trees: galloping finds what walking finds, on every level, and removal keeps the tree whole."""

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import BlockKey, Namespace, Tier, extend_chain
from keepwarm.store.prefix import LEVELS, NO_COPY, PrefixTree

ROOT = Namespace(model="m", block_size=1).root()


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[list[BlockKey], list[Tier]]]:
    """Chains of keys, later ones often branching off earlier ones, with falling tiers along each."""
    rows: list[list[int]] = []
    made: list[tuple[list[BlockKey], list[Tier]]] = []
    for _ in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from([[], *rows]))
        keep = draw(st.integers(0, len(base)))
        tokens = base[:keep] + draw(st.lists(st.integers(0, 3), max_size=40))
        rows.append(tokens)
        borders = sorted(draw(st.lists(st.integers(0, len(tokens)), min_size=3, max_size=3)))
        tiers = [list(Tier)[sum(index >= border for border in borders)] for index in range(len(tokens))]
        made.append((extend_chain(ROOT, ROOT, tokens, 1), tiers))
    return made


def build(made: list[tuple[list[BlockKey], list[Tier]]]) -> PrefixTree:
    tree = PrefixTree()
    for keys, tiers in made:
        parent = None
        for key, tier in zip(keys, tiers, strict=True):
            node = tree.get(key) or tree.insert(key, parent, 0.0)
            # Where chains disagree about a shared block, it must stay at least as fast as its children.
            if tier not in node.copies and LEVELS[tier] >= (parent.level if parent else 0):
                tree.add_copy(node, tier, 1)
            elif not node.copies:
                tree.add_copy(node, list(Tier)[parent.level if parent else 0], 1)
            parent = node
    return tree


@settings(max_examples=300, deadline=None)
@given(made=chains(), cut=st.integers(0, 40), extra=st.lists(st.integers(4, 9), max_size=5))
def test_galloping_equals_walking(
    made: list[tuple[list[BlockKey], list[Tier]]], cut: int, extra: list[int]
) -> None:
    tree = build(made)
    tree.check_invariants()
    for keys, _ in made:
        foreign = extend_chain(ROOT, keys[:cut][-1] if keys[:cut] else ROOT, extra, 1)
        for asked in (keys, keys[:cut], [*keys[:cut], *foreign], foreign):
            for level in range(NO_COPY):
                length = tree.prefix_length(asked, level)
                assert length == tree.walked_prefix_length(asked, level)
                assert [node.key for node in tree.longest_prefix(asked, level)] == asked[:length]
        assert tree.prefix_length(keys) == len(keys)


@settings(max_examples=100, deadline=None)
@given(made=chains(), data=st.data())
def test_leaves_can_go_in_any_order(
    made: list[tuple[list[BlockKey], list[Tier]]], data: st.DataObject
) -> None:
    tree = build(made)
    for _ in range(len(tree)):
        leaves = sorted((node for node in tree if not node.has_children), key=lambda node: node.key)
        node = data.draw(st.sampled_from(leaves))
        for tier in list(node.copies):
            tree.remove_copy(node, tier)
        tree.remove(node)
        tree.check_invariants()
        assert node.key not in tree
    assert len(tree) == 0
