"""Who may use a folder as a disk tier: one process at a time, for the blocks it was made for."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_disk_rig import BUDGET, IDENTITY, RAW, bytes_on_disk, open_tier, readable, segment_files, store

from keepwarm.core.errors import ConfigurationError, TierFull, TierUnavailable
from keepwarm.store.record import BlockRead
from keepwarm.store.tiers.disk.folder import LOCK_NAME
from keepwarm.store.tiers.disk.identity import MANIFEST_NAME, DiskIdentity, read_identity
from keepwarm.store.tiers.disk.tier import DiskTier

_HOLD = """
import sys
from pathlib import Path
from test_disk_rig import open_tier
tier = open_tier(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def open_as(folder: Path, identity: DiskIdentity) -> DiskTier:
    return DiskTier.open(
        folder, identity=identity, capacity_bytes=BUDGET, codec=RAW, codecs={0: RAW}, segment_bytes=4096
    )


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=rf"in use by process {holder.pid}\. Stop"):
            open_tier(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    open_tier(tmp_path).close()


def test_a_second_opening_in_one_process_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, [1])
    with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()}"):
        open_tier(tmp_path)
    assert readable(tier, [1]) == {1}
    tier.close()
    open_tier(tmp_path).close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "f2"}, "model 'f1' there, 'f2' here"),
        ({"block_size": 8}, "block_size 4 there, 8 here"),
        ({"block_bytes": 600}, "block_bytes 500 there, 600 here"),
        ({"kv_layout": "f16"}, "kv_layout 'f32/lkhd' there, 'f16' here"),
    ],
)
def test_a_folder_of_other_blocks_is_refused_and_left_alone(
    tmp_path: Path, change: dict[str, str | int], said: str
) -> None:
    tier = open_tier(tmp_path)
    store(tier, range(10))
    tier.close()
    before = listing(tmp_path)
    with pytest.raises(ConfigurationError) as raised:
        open_as(tmp_path, replace(IDENTITY, **change))  # type: ignore[arg-type]
    assert said in str(raised.value)
    assert "--kv-disk" in str(raised.value)
    assert listing(tmp_path) == before


def test_the_name_of_the_model_is_only_for_people(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    open_as(tmp_path, replace(IDENTITY, model_name="renamed")).close()


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    path = tmp_path / MANIFEST_NAME
    manifest = json.loads(path.read_text()) | {"format_version": 2, "news": True}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ConfigurationError, match=r"format version 2; this Keepwarm reads version 1"):
        open_tier(tmp_path)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigurationError, match=r"not empty .*'thesis.txt'.*Nothing was touched"):
        open_tier(tmp_path)
    assert listing(tmp_path) == {"thesis.txt": b"years of work"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ConfigurationError, match="--kv-disk"):
        open_tier(path)


@pytest.mark.parametrize("left", [[LOCK_NAME], [LOCK_NAME, f"{MANIFEST_NAME}.new"], ["lost+found"]])
def test_a_start_that_was_cut_short_can_be_repeated(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).write_text("half")
    tier = open_tier(tmp_path)
    store(tier, [1])
    assert readable(tier, [1]) == {1}
    tier.close()


def test_the_identity_of_a_folder_can_be_read(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    assert read_identity(tmp_path) == IDENTITY
    with pytest.raises(ConfigurationError, match="not the folder of a disk tier"):
        read_identity(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("budget_bytes", "segment_bytes", "said"),
    [(8192, 4096, "at least 16384"), (1000, None, "at least 16384"), (BUDGET, 300, "give 4096 to")],
)
def test_a_budget_that_cannot_work_is_refused(
    tmp_path: Path, budget_bytes: int, segment_bytes: int | None, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_tier(tmp_path / "new", budget_bytes=budget_bytes, segment_bytes=segment_bytes)
    assert not (tmp_path / "new").exists()


def test_looking_needs_no_lock_and_changes_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, range(10))
    before = listing(tmp_path)
    looker = DiskTier.open_read_only(tmp_path, codecs={0: RAW})
    assert looker.identity == IDENTITY
    assert {outcome for _, outcome in looker.verify()} == {BlockRead.OK}
    assert looker.stat().num_blocks == 10
    assert not looker.is_writable
    with pytest.raises(TierFull, match="reading only"):
        store(looker, [11])
    looker.close()
    assert listing(tmp_path) == before
    assert readable(tier, range(10)) == set(range(10))
    tier.close()


def test_a_smaller_budget_gives_up_the_oldest(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, range(60))
    tier.close()
    tier = open_tier(tmp_path, budget_bytes=BUDGET // 2)
    assert bytes_on_disk(tmp_path) <= BUDGET // 2
    kept = readable(tier, range(60))
    assert kept == set(range(60 - len(kept), 60))
    assert len(kept) * 640 > BUDGET // 4
    tier.close()


def test_larger_segments_of_an_earlier_setting_still_fit_the_budget(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, segment_bytes=16384)
    store(tier, range(60))
    tier.close()
    assert max(path.stat().st_size for path in segment_files(tmp_path)) > 8192
    tier = open_tier(tmp_path, segment_bytes=4096)
    kept = readable(tier, range(60))
    assert len(kept) > 30
    for number in range(100, 400):
        if tier.stat().live_bytes + 700 > tier.capacity_bytes:
            entry = next(iter(tier.entries()))
            tier.drop([entry.key])
        store(tier, [number])
        assert bytes_on_disk(tmp_path) <= BUDGET
    tier.close()


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_folder_that_was_removed_meanwhile_is_not_written_to(tmp_path: Path, is_made_anew: bool) -> None:
    folder = tmp_path / "kv"
    tier = open_tier(folder)
    store(tier, range(4))
    shutil.rmtree(folder)
    other = open_tier(folder) if is_made_anew else None
    with pytest.raises(TierUnavailable, match="removed, or made anew"):
        store(tier, range(10, 12))
    if other:
        store(other, range(20, 22))
        assert readable(other, range(30)) == {20, 21}
        other.close()
    tier.close()
    assert folder.exists() == is_made_anew
