"""What a start makes of a disk that holds more than it may, or blocks that nothing leads to."""

from keepwarm.core.blocks import BlockKey, Tier
from keepwarm.store.eviction.families import family_of
from keepwarm.store.manager import BlockManager, StoreSettings
from keepwarm.store.record import NO_PARENT
from keepwarm.store.tiers.base import TierFacts
from keepwarm.store.tiers.keyed import StoredEntry


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16))


def entry(name: str, parent: str | None) -> StoredEntry:
    return StoredEntry(key(name), key(parent) if parent else NO_PARENT, 10)


def loaded(entries: list[StoredEntry], capacity_bytes: int) -> BlockManager:
    blocks = BlockManager(
        StoreSettings(num_device_blocks=4, num_host_blocks=4),
        family=family_of("leaf-lru"),
        slow_tiers={Tier.DISK: TierFacts("disk", True, capacity_bytes)},
    )
    blocks.load(Tier.DISK, entries)
    blocks.check_invariants()
    return blocks


def test_beyond_the_capacity_ends_of_chains_go_and_what_others_follow_stays() -> None:
    # The shared beginning was written first: by age alone it would go first, and take all with it.
    chain = [entry("root", None), *(entry(f"old{i}", f"old{i - 1}" if i else "root") for i in range(3))]
    blocks = loaded([*chain, entry("new0", "root"), entry("new1", "new0")], capacity_bytes=40)
    keys = [key(name) for name in ("root", "new0", "new1")]
    assert blocks.match(keys).num_slow_hits == 3
    assert blocks.match([key(name) for name in ("root", "old0", "old1")]).num_slow_hits == 2
    assert blocks.used_bytes(Tier.DISK) == 40
    assert blocks.expected_on_disk() >= {key("old1"), key("old2")}, "the tier is told to forget them"


def test_blocks_that_nothing_leads_to_are_given_up_on_the_tier_too() -> None:
    blocks = loaded([entry("root", None), entry("orphan", "gone"), entry("its child", "orphan")], 1000)
    assert blocks.num_used(Tier.DISK) == 1
    assert blocks.expected_on_disk() == {key("root"), key("orphan"), key("its child")}
