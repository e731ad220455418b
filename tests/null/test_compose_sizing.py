"""Default sizes of the KV tiers."""

from keepwarm.compose.sizing import MAX_DEFAULT_DEVICE_TOKENS, TierSizes, tier_sizes

GIB = 1024**3


def sizes(memory_bytes: int, *, device: int | None = None, host: int | None = None) -> TierSizes:
    return tier_sizes(
        memory_bytes=memory_bytes,
        kv_bytes_per_token=46_080,
        block_size=16,
        max_model_len=8192,
        device_tokens=device,
        host_bytes=host,
    )


def test_configured_sizes_are_taken_and_rounded_up_to_blocks() -> None:
    assert sizes(8 * GIB, device=33, host=0) == TierSizes(num_device_blocks=3, host_bytes=0)


def test_defaults_are_shares_of_memory() -> None:
    assert sizes(8 * GIB).host_bytes == 2 * GIB
    assert sizes(8 * GIB).num_device_blocks * 16 * 46_080 < 1.3 * GIB


def test_a_small_machine_still_holds_one_whole_sequence_and_a_large_one_stays_reasonable() -> None:
    assert sizes(GIB).num_device_blocks * 16 == 8192
    assert sizes(1000 * GIB).num_device_blocks * 16 == MAX_DEFAULT_DEVICE_TOKENS
