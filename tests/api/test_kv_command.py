"""`keepwarm kv` through the real command line, on folders of real disk tiers with small blocks."""

import errno
import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from blake3 import blake3
from rich.console import Console

from keepwarm.cli.kv import verify as verify_module
from keepwarm.cli.kv.progress import bytes_progress
from keepwarm.cli.kv.stored import StoredBlocks
from keepwarm.cli.main import main
from keepwarm.core.blocks import BlockKey, Namespace, extend_chain
from keepwarm.store.codecs.registry import LOSSLESS, codec_named
from keepwarm.store.record import HEADER_BYTES, NO_PARENT, BlockLabel, BlockRead
from keepwarm.store.tiers.disk.archive import FRAME_BYTES, ArchiveEnd, ArchiveReader
from keepwarm.store.tiers.disk.files import Files
from keepwarm.store.tiers.disk.identity import MANIFEST_NAME, DiskIdentity, read_identity
from keepwarm.store.tiers.disk.segment import SEGMENT_HEADER_BYTES
from keepwarm.store.tiers.disk.tier import DiskTier

# `main` reads sys.argv, which these tests set; Cyclopts takes that for an oversight.
pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")

BLOCK_SIZE = 4
IDENTITY = DiskIdentity(
    model="f1", model_name="small", block_size=BLOCK_SIZE, block_bytes=500, kv_layout="f32/lkhd"
)
BUDGET = 64 * 1024
RECORD_BYTES = HEADER_BYTES + 4 * BLOCK_SIZE + IDENTITY.block_bytes
SALT = "tenant-1"


class Said(NamedTuple):
    code: int
    out: str
    err: str


Kv = Callable[..., Said]


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kv:
    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["keepwarm", "kv", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
        return Said(code, captured.out, " ".join(captured.err.split()))

    return run


def labels(num_blocks: int, *, salt: str = SALT) -> list[BlockLabel]:
    """One chain, its tokens beside it."""
    root = Namespace("f1", BLOCK_SIZE, salt=salt).root()
    tokens = tuple(range(num_blocks * BLOCK_SIZE))
    keys = extend_chain(root, root, tokens, BLOCK_SIZE)
    return [
        BlockLabel(key, parent, tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
        for index, (key, parent) in enumerate(zip(keys, [NO_PARENT, *keys], strict=False))
    ]


CHAIN = labels(60)


def block_of(key: BlockKey) -> memoryview:
    return memoryview(blake3(key).digest(length=IDENTITY.block_bytes))


def open_tier(
    folder: Path, *, budget_bytes: int = BUDGET, codec: str = "raw", identity: DiskIdentity = IDENTITY
) -> DiskTier:
    return DiskTier.open(
        folder,
        identity=identity,
        capacity_bytes=budget_bytes,
        codec=codec_named(codec),
        codecs=LOSSLESS,
        segment_bytes=4096,
    )


def store(tier: DiskTier, what: Sequence[BlockLabel]) -> None:
    tier.write(what, [block_of(label.key) for label in what])


def filled(folder: Path, what: Sequence[BlockLabel] = CHAIN[:20], *, codec: str = "raw") -> Path:
    tier = open_tier(folder, codec=codec)
    store(tier, what)
    tier.close()
    return folder


def with_dead_bytes(folder: Path) -> Path:
    """Twenty blocks, ten of which were stored twice."""
    tier = open_tier(folder)
    store(tier, CHAIN[:20])
    tier.drop([label.key for label in CHAIN[:10]])
    store(tier, CHAIN[:10])
    tier.close()
    return folder


def held(folder: Path, *, budget_bytes: int = BUDGET) -> list[BlockKey]:
    """Keys of the blocks that a server finds there, all checked to be the right ones."""
    tier = open_tier(folder, budget_bytes=budget_bytes)
    keys = [entry.key for entry in tier.entries()]
    for key in keys:
        out = bytearray(IDENTITY.block_bytes)
        assert tier.read([key], [memoryview(out)]) == [BlockRead.OK]
        assert out == block_of(key)
    tier.close()
    return keys


def keys_of(what: Sequence[BlockLabel]) -> set[BlockKey]:
    return {label.key for label in what}


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kws"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def rot(folder: Path, index: int = 1) -> None:
    """Hurt one of the first segment's records."""
    flip(segments(folder)[0], SEGMENT_HEADER_BYTES + (index + 1) * RECORD_BYTES - 1)


def archived(file: Path) -> tuple[list[BlockLabel], ArchiveEnd]:
    with file.open("rb") as stream:
        reader = ArchiveReader(stream, "it", LOSSLESS)
        records = [record for record in reader.records() if record is not None]
        return [record.header.label for record in records], reader.end


# stat


def test_stat_says_what_a_folder_holds_while_a_server_uses_it(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path)
    tier = open_tier(tmp_path)
    store(tier, CHAIN[20:25])
    said = kv("stat", tmp_path, "--json")
    assert said.code == 0
    row = json.loads(said.out)
    found = tier.stat()
    assert {
        name: row[name] for name in ("model", "model_name", "block_size", "block_bytes", "kv_layout")
    } == {
        "model": "f1",
        "model_name": "small",
        "block_size": 4,
        "block_bytes": 500,
        "kv_layout": "f32/lkhd",
    }
    assert (row["num_blocks"], row["live_bytes"]) == (25, found.live_bytes)
    assert (row["num_segments"], row["num_unsealed_segments"]) == (found.num_segments, 1)
    assert row["file_bytes"] == sum(path.stat().st_size for path in segments(tmp_path))
    assert (row["format_version"], row["budget_bytes"], row["num_rotten"]) == (1, None, None)
    text = kv("stat", tmp_path).out
    assert "small (f1)" in text
    assert "25 of 4 tokens, 500 bytes" in text
    assert f"{found.num_segments} segments, 1 of them growing" in text
    tier.close()


def test_stat_tells_the_share_of_dead_bytes(tmp_path: Path, kv: Kv) -> None:
    with_dead_bytes(tmp_path)
    row = json.loads(kv("stat", tmp_path, "--json").out)
    # Ten of thirty records, and some overhead.
    assert 10 / 30 < row["dead_share"] < 10 / 30 + 0.05
    assert row["dead_share"] == round(1 - row["live_bytes"] / row["file_bytes"], 6)
    assert f"dead share  {row['dead_share']:.1%}" in kv("stat", tmp_path).out


# verify


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_verify_reads_all_beside_a_server_and_changes_nothing(tmp_path: Path, kv: Kv, codec: str) -> None:
    filled(tmp_path, codec=codec)
    tier = open_tier(tmp_path)
    before = listing(tmp_path)
    said = kv("verify", tmp_path)
    assert said == (0, said.out, "")
    assert [line.split()[:2] for line in said.out.splitlines()] == [
        ["sound", "20"],
        ["rotten", "0"],
        ["missing", "0"],
        ["orphans", "0"],
    ]
    assert listing(tmp_path) == before
    tier.close()


def test_verify_counts_rotten_blocks_and_what_they_cut_off(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path)
    rot(tmp_path, 1)
    rot(tmp_path, 3)
    before = listing(tmp_path)
    said = kv("verify", tmp_path)
    assert said.code == 4
    assert "sound    18" in said.out
    assert "rotten   2" in said.out
    assert "missing  0" in said.out
    assert "orphans  17" in said.out
    assert "2 of 20 blocks" in said.err
    assert "compact --rotten" in said.err
    assert listing(tmp_path) == before


def test_verify_finds_orphans_however_long_their_chain_is(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path, [*CHAIN[10:20], *CHAIN[:4]])
    assert "orphans  10" in kv("verify", tmp_path).out
    tier = open_tier(tmp_path)
    store(tier, CHAIN[4:10])
    tier.close()
    assert "orphans  0" in kv("verify", tmp_path).out


def test_a_record_that_moves_while_it_is_verified_is_sound(
    tmp_path: Path, kv: Kv, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    store(tier, CHAIN[:20])
    tier.drop([CHAIN[0].key, CHAIN[10].key])
    store(tier, [CHAIN[0], CHAIN[10]])
    names = [path.name for path in segments(tmp_path)]
    moved: list[int] = []

    def compact(num_bytes: int) -> None:
        if not moved:
            moved.append(tier.compact())

    class Bar:
        def __init__(self, doing: str, total_bytes: int) -> None:
            pass

        def __enter__(self) -> Callable[[int], None]:
            return compact

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(verify_module, "bytes_progress", Bar)
    said = kv("verify", tmp_path)
    assert moved[0] > 0
    assert len(set(names) - {path.name for path in segments(tmp_path)}) >= 2, "nothing was moved"
    assert said.code == 0
    assert "sound    20" in said.out
    assert "missing  0" in said.out
    tier.close()


def test_a_record_whose_place_another_one_took_is_missing_and_not_rotten(tmp_path: Path) -> None:
    filled(tmp_path, CHAIN[:5])
    stored = StoredBlocks(tmp_path, LOSSLESS)
    for path in segments(tmp_path):
        path.unlink()
    # Numbers of segments begin anew in an empty folder.
    filled(tmp_path, CHAIN[40:45])
    assert {stored.read(label.key).outcome for label in CHAIN[:5]} == {BlockRead.MISSING}
    assert stored.read(CHAIN[40].key).outcome is BlockRead.OK


def test_what_moves_while_the_folder_is_listed_is_found(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, CHAIN[:20])
    tier.drop([label.key for label in CHAIN[:20:2]])
    store(tier, CHAIN[:20:2])

    class CompactingFiles(Files):
        num_listed = 0

        def names(self, folder: Path) -> list[str]:
            names = super().names(folder)
            self.num_listed += 1
            if self.num_listed == 1:
                assert tier.compact() > 0
            return names

    stored = StoredBlocks(tmp_path, LOSSLESS, CompactingFiles())
    assert {stored.read(label.key).outcome for label in CHAIN[:20]} == {BlockRead.OK}
    tier.close()


def test_a_bad_spot_on_the_medium_costs_one_block(tmp_path: Path) -> None:
    filled(tmp_path, CHAIN[:18])
    assert len(segments(tmp_path)) == 3

    class BadSpot(Files):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            # The third record of each segment.
            if offset == SEGMENT_HEADER_BYTES + 2 * RECORD_BYTES:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(fd, buffers, offset)

    stored = StoredBlocks(tmp_path, LOSSLESS, BadSpot())
    outcomes = [stored.read(label.key).outcome for label in CHAIN[:18]]
    assert outcomes.count(BlockRead.ROTTEN) == 3
    assert outcomes.count(BlockRead.OK) == 15


def test_a_segment_that_cannot_be_read_is_reported(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path)
    path = segments(tmp_path)[0]
    path.unlink()
    path.mkdir()
    said = kv("verify", tmp_path)
    assert said.code == 4
    assert "1 segments" in said.err
    assert "cannot be read" in said.err


def test_verify_tells_what_a_torn_write_cost(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path)
    data = segments(tmp_path)[-1].read_bytes()
    segments(tmp_path)[-1].write_bytes(data[: SEGMENT_HEADER_BYTES + RECORD_BYTES + 100])
    said = kv("verify", tmp_path)
    assert said.code == 0
    assert "lost     100 bytes" in said.out


@pytest.mark.parametrize(("salt", "confirmed", "refused"), [(SALT, 18, 1), ("", 0, 19), ("tenant-2", 0, 19)])
def test_an_audit_confirms_keys_from_their_tokens(
    tmp_path: Path, kv: Kv, salt: str, confirmed: int, refused: int
) -> None:
    forged = replace(CHAIN[7], token_ids=(9, 9, 9, 9))
    without = replace(CHAIN[8], token_ids=())
    filled(tmp_path, [*CHAIN[:7], forged, without, *CHAIN[9:20]])
    said = kv("verify", tmp_path, "--audit-salt", salt)
    assert said.code == 0
    assert f"audit    {confirmed} keys confirmed, {refused} not" in said.out
    assert "1 blocks without tokens" in said.out
    assert "audit" not in kv("verify", tmp_path).out


def test_an_audit_without_a_salt_is_for_requests_without_one(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path, labels(5, salt=""))
    assert "audit    5 keys confirmed, 0 not" in kv("verify", tmp_path, "--audit-salt", "").out


# compact


def test_compact_wins_back_dead_bytes_and_keeps_every_block(tmp_path: Path, kv: Kv) -> None:
    with_dead_bytes(tmp_path)
    before = sum(path.stat().st_size for path in segments(tmp_path))
    said = kv("compact", tmp_path)
    after = sum(path.stat().st_size for path in segments(tmp_path))
    assert said.code == 0
    assert before - after > 9 * RECORD_BYTES
    assert f"won back {before - after} bytes: {before} before, {after} now" in said.out
    assert keys_of(CHAIN[:20]) == set(held(tmp_path))
    assert json.loads(kv("stat", tmp_path, "--json").out)["dead_share"] < 0.1


def test_compact_takes_out_rotten_blocks_and_an_export_brings_them_back(tmp_path: Path, kv: Kv) -> None:
    folder, file = filled(tmp_path / "tier"), tmp_path / "file"
    kv("export", folder, file)
    rot(folder)
    assert kv("compact", folder).code == 0
    assert kv("verify", folder).code == 4
    said = kv("compact", folder, "--rotten")
    assert "19 blocks, 1 rotten ones taken out" in said.out
    assert kv("verify", folder).code == 0
    assert set(held(folder)) == keys_of(CHAIN[:20]) - {CHAIN[1].key}
    assert "1 blocks imported, 19 were there already" in kv("import", folder, file).out
    assert set(held(folder)) == keys_of(CHAIN[:20])


def test_what_compact_writes_fits_a_server_with_a_small_budget(tmp_path: Path, kv: Kv) -> None:
    tier = open_tier(tmp_path)
    store(tier, CHAIN[:40])
    tier.drop([label.key for label in CHAIN[:40:2]])
    store(tier, CHAIN[:40:2])
    tier.close()
    kv("compact", tmp_path)
    assert set(held(tmp_path)) == keys_of(CHAIN[:40])


@pytest.mark.parametrize("command", ["compact", "import"])
def test_what_writes_is_refused_while_a_server_uses_the_folder(tmp_path: Path, kv: Kv, command: str) -> None:
    folder = with_dead_bytes(tmp_path / "tier")
    file = tmp_path / "file"
    kv("export", folder, file)
    tier = open_tier(folder)
    before = listing(folder)
    said = kv(command, folder, *([file] if command == "import" else []))
    assert said.code == 3
    assert f"in use by process {os.getpid()}" in said.err
    assert listing(folder) == before
    tier.close()


# export and import


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_blocks_come_back_from_a_file(tmp_path: Path, kv: Kv, codec: str) -> None:
    folder = filled(tmp_path / "tier", CHAIN, codec=codec)
    file = tmp_path / "blocks.kwa"
    tier = open_tier(folder)
    said = kv("export", folder, file)
    tier.close()
    assert (said.code, said.err) == (0, "")
    assert f"60 blocks in {file}, {file.stat().st_size} bytes" in said.out
    said = kv("import", tmp_path / "new", file)
    assert (said.code, said.err) == (0, "")
    assert "60 blocks imported, 0 were there already" in said.out
    assert read_identity(tmp_path / "new") == IDENTITY
    assert set(held(tmp_path / "new")) == keys_of(CHAIN)
    assert kv("verify", tmp_path / "new", "--audit-salt", SALT).out.count("60") == 2
    before = listing(tmp_path / "new")
    assert "0 blocks imported, 60 were there already" in kv("import", tmp_path / "new", file).out
    assert listing(tmp_path / "new") == before


def test_import_adds_to_what_is_there(tmp_path: Path, kv: Kv) -> None:
    file = tmp_path / "file"
    kv("export", filled(tmp_path / "a", CHAIN[:20]), file)
    folder = filled(tmp_path / "b", CHAIN[15:30])
    assert "15 blocks imported, 5 were there already" in kv("import", folder, file).out
    assert set(held(folder)) == keys_of(CHAIN[:30])


def test_parents_come_first_in_a_file_whatever_the_order_in_the_folder(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path / "tier", [*CHAIN[10:15], *CHAIN[5:10][::-1], *CHAIN[:5]])
    kv("export", tmp_path / "tier", tmp_path / "file")
    found, end = archived(tmp_path / "file")
    assert end is ArchiveEnd.WHOLE
    assert [label.key for label in found] == [label.key for label in CHAIN[:15]]


def test_chosen_keys_bring_what_leads_to_them(tmp_path: Path, kv: Kv) -> None:
    other = labels(6, salt="tenant-2")
    filled(tmp_path / "tier", [*CHAIN[:20], *other])
    file = tmp_path / "file"
    said = kv("export", tmp_path / "tier", file, "--keys", CHAIN[3].key.hex(), other[1].key.hex())
    assert said.code == 0
    found, _ = archived(file)
    assert [label.key for label in found] == [label.key for label in [*CHAIN[:4], *other[:2]]]


@pytest.mark.parametrize("key", ["xyz", "ab", CHAIN[50].key.hex()])
def test_a_key_that_is_none_makes_no_file(tmp_path: Path, kv: Kv, key: str) -> None:
    filled(tmp_path / "tier")
    said = kv("export", tmp_path / "tier", tmp_path / "file", "--keys", CHAIN[0].key.hex(), key)
    assert said.code == 3
    assert key in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "file").exists()


def test_a_file_is_replaced_only_by_force(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path / "tier")
    file = tmp_path / "file"
    file.write_text("years of work")
    said = kv("export", tmp_path / "tier", file)
    assert said.code == 3
    assert "is there already" in said.err
    assert file.read_text() == "years of work"
    assert kv("export", tmp_path / "tier", file, "--force").code == 0
    assert len(archived(file)[0]) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tier"]


@pytest.mark.parametrize("force", [True, False])
def test_an_export_that_fails_leaves_nothing_behind(
    tmp_path: Path, kv: Kv, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    filled(tmp_path / "tier")
    file = tmp_path / "file"
    if force:
        file.write_text("years of work")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = kv("export", tmp_path / "tier", file, *(["--force"] if force else []))
    assert said.code == 4
    assert "No space left" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == (["file", "tier"] if force else ["tier"])
    assert not force or file.read_text() == "years of work"


def test_export_leaves_out_rotten_blocks_and_says_so(tmp_path: Path, kv: Kv) -> None:
    filled(tmp_path / "tier")
    rot(tmp_path / "tier")
    said = kv("export", tmp_path / "tier", tmp_path / "file")
    assert said.code == 4
    assert "19 blocks in" in said.out
    assert "1 blocks" in said.err
    found, end = archived(tmp_path / "file")
    assert end is ArchiveEnd.WHOLE
    assert {label.key for label in found} == keys_of(CHAIN[:20]) - {CHAIN[1].key}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "f2", "model_name": "large"}, "model 'f1' in the file, 'f2' in the folder"),
        ({"block_size": 8}, "block_size 4 in the file, 8 in the folder"),
        ({"block_bytes": 600}, "block_bytes 500 in the file, 600 in the folder"),
        ({"kv_layout": "f16"}, "kv_layout 'f32/lkhd' in the file, 'f16' in the folder"),
    ],
)
def test_blocks_of_another_kind_are_refused(
    tmp_path: Path, kv: Kv, change: dict[str, str | int], said: str
) -> None:
    file = tmp_path / "file"
    kv("export", filled(tmp_path / "tier"), file)
    open_tier(tmp_path / "other", identity=replace(IDENTITY, **change)).close()  # type: ignore[arg-type]
    before = listing(tmp_path / "other")
    found = kv("import", tmp_path / "other", file)
    assert found.code == 3
    assert said in found.err
    assert listing(tmp_path / "other") == before


def test_a_file_cut_off_anywhere_gives_what_is_whole_in_it(tmp_path: Path, kv: Kv) -> None:
    file = tmp_path / "file"
    kv("export", filled(tmp_path / "tier", CHAIN[:4]), file)
    data = file.read_bytes()
    start = len(data) - FRAME_BYTES - 4 * (FRAME_BYTES + RECORD_BYTES)
    edges = [start + n * (FRAME_BYTES + RECORD_BYTES) for n in range(5)]
    cuts = {edge + step for edge in edges for step in (-1, 0, 1, FRAME_BYTES, FRAME_BYTES + HEADER_BYTES)}
    for cut in sorted(cut for cut in cuts if start <= cut < len(data)):
        file.write_bytes(data[:cut])
        folder = tmp_path / f"new{cut}"
        said = kv("import", folder, file)
        num_whole = (cut - start) // (FRAME_BYTES + RECORD_BYTES)
        assert said.code == 4, cut
        assert "is cut off" in said.err
        assert f"{num_whole} blocks imported" in said.out
        assert held(folder) == [label.key for label in CHAIN[:num_whole]]


def test_one_hurt_byte_costs_at_most_one_block(tmp_path: Path, kv: Kv) -> None:
    file = tmp_path / "file"
    kv("export", filled(tmp_path / "tier", CHAIN[:3]), file)
    data = file.read_bytes()
    end = len(data) - FRAME_BYTES
    first = end - 3 * (FRAME_BYTES + RECORD_BYTES)
    second = first + FRAME_BYTES + RECORD_BYTES
    in_record = (FRAME_BYTES, FRAME_BYTES + 8, FRAME_BYTES + HEADER_BYTES - 1, FRAME_BYTES + RECORD_BYTES - 1)
    for offset in (0, 4, FRAME_BYTES - 1, *in_record):
        file.write_bytes(data)
        flip(file, second + offset)
        folder = tmp_path / f"new{offset}"
        said = kv("import", folder, file)
        lost = [CHAIN[1].key] if offset in in_record else []
        assert held(folder) == [label.key for label in CHAIN[:3] if label.key not in lost], offset
        assert said.code == (4 if lost else 0), offset
        assert ("1 rotten blocks" in said.err) == bool(lost), offset
    for offset in range(0, first, 5):
        file.write_bytes(data)
        flip(file, offset)
        said = kv("import", tmp_path / "none", file)
        assert said.code == 3, offset
        assert not (tmp_path / "none").exists()
    file.write_bytes(data)
    flip(file, end)
    assert kv("import", tmp_path / "end", file).code == 4
    assert held(tmp_path / "end") == [label.key for label in CHAIN[:3]]


def test_a_place_hurt_twice_is_not_passed_over_in_silence(tmp_path: Path, kv: Kv) -> None:
    file = tmp_path / "file"
    kv("export", filled(tmp_path / "tier", CHAIN[:3]), file)
    second = file.stat().st_size - FRAME_BYTES - 2 * (FRAME_BYTES + RECORD_BYTES)
    flip(file, second)
    flip(file, second + FRAME_BYTES)
    said = kv("import", tmp_path / "new", file)
    assert said.code == 4
    assert "damage" in said.err
    assert held(tmp_path / "new") == [CHAIN[0].key]


def test_an_import_with_a_budget_takes_what_a_server_with_it_keeps(tmp_path: Path, kv: Kv) -> None:
    file = tmp_path / "file"
    kv("export", filled(tmp_path / "tier", CHAIN), file)
    budget_bytes = 32 * 1024
    said = kv("import", tmp_path / "new", file, "--bytes", budget_bytes)
    assert said.code == 4
    assert "--bytes" in said.err
    # Larger segments than 4096 bytes would be the server's to remove.
    kept = held(tmp_path / "new", budget_bytes=budget_bytes)
    assert f"{len(kept)} blocks imported" in said.out
    assert kept == [label.key for label in CHAIN[: len(kept)]]
    assert len(kept) > 25
    # What is there is never given up for what comes.
    assert kv("import", tmp_path / "new", file, "--bytes", 16 * 1024).code == 4
    assert held(tmp_path / "new", budget_bytes=budget_bytes) == kept
    said = kv("import", tmp_path / "none", file, "--bytes", 1000)
    assert said.code == 3
    assert "at least 16384" in said.err
    assert not (tmp_path / "none").exists()


def test_memory_does_not_grow_with_the_folder(tmp_path: Path, kv: Kv) -> None:
    mib = 1 << 20
    identity = replace(IDENTITY, block_bytes=mib)
    tier = DiskTier.open(
        tmp_path / "tier",
        identity=identity,
        capacity_bytes=512 * mib,
        codec=codec_named("raw"),
        codecs=LOSSLESS,
    )
    block = memoryview(bytes(mib))
    for label in CHAIN:
        tier.write([label], [block])
    tier.close()
    tracemalloc.start()
    try:
        assert kv("export", tmp_path / "tier", tmp_path / "file").code == 0
        assert tracemalloc.get_traced_memory()[1] < 8 * mib
        tracemalloc.reset_peak()
        assert kv("import", tmp_path / "new", tmp_path / "file").code == 0
        assert tracemalloc.get_traced_memory()[1] < 20 * mib
    finally:
        tracemalloc.stop()


# bad input


@pytest.mark.parametrize("command", ["stat", "verify", "compact", "export"])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere", "there is no folder"),
        ("file", "is a file"),
        ("empty", "not the folder of a disk tier"),
        ("foreign", "not the folder of a disk tier"),
        ("damaged", "is damaged"),
    ],
)
def test_what_is_no_folder_of_a_disk_tier(
    tmp_path: Path, kv: Kv, command: str, place: str, said: str
) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("empty", "foreign", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("years of work")
    (tmp_path / "damaged" / MANIFEST_NAME).write_text("{")
    out = [tmp_path / "out"] if command == "export" else []
    found = kv(command, tmp_path / place, *out)
    assert found.code == 3
    assert said in found.err
    assert str(tmp_path / place) in found.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "empty", "file", "foreign"]
    assert listing(tmp_path / "empty") == {}
    assert listing(tmp_path / "foreign") == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read"),
        (b"", "is empty"),
        (b"years of work", "not an archive of KV blocks"),
        (b"KWARCHIV", "damaged or cut off"),
        (b"KWARCHIV\x02\x00\x00\x00\x00\x00\x00\x00", "version 2; this Keepwarm reads version 1"),
        (b"KWARCHIV\x01\x00\x00\x00\xff\xff\xff\xff", "damaged or cut off"),
    ],
)
def test_what_is_no_exported_file(tmp_path: Path, kv: Kv, content: bytes | None, said: str) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    found = kv("import", tmp_path / "new", file)
    assert found.code == 3
    assert said in found.err
    assert str(file) in found.err
    assert not (tmp_path / "new").exists()


def test_import_touches_no_folder_that_is_not_ours(tmp_path: Path, kv: Kv) -> None:
    file = tmp_path / "file"
    kv("export", filled(tmp_path / "tier"), file)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("years of work")
    found = kv("import", tmp_path / "foreign", file)
    assert found.code == 3
    assert "not empty" in found.err
    assert listing(tmp_path / "foreign") == {"thesis.txt": b"years of work"}
    # Folder and file the wrong way round.
    assert "is a file" in kv("import", file, tmp_path / "tier").err


@pytest.mark.parametrize("place", [".", "nowhere/file"])
def test_a_place_where_no_file_can_be_written(tmp_path: Path, kv: Kv, place: str) -> None:
    filled(tmp_path / "tier")
    said = kv("export", tmp_path / "tier", tmp_path / place, "--force")
    assert said.code == 3
    assert str(tmp_path / place) in said.err


def test_a_process_ends_with_a_message_and_no_traceback(tmp_path: Path) -> None:
    filled(tmp_path)
    rot(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm", "kv", "verify", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 4
    assert done.stdout.startswith("sound    19 blocks\n")
    assert done.stderr.startswith("keepwarm: 1 of 20 blocks")
    assert "Traceback" not in done.stderr


def test_the_bar_shows_how_fast_it_goes() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with bytes_progress("reading", 3_000_000, console) as on_bytes:
        on_bytes(1_000_000)
        on_bytes(1_000_000)
    assert "reading" in shown.getvalue()
    assert "2.0/3.0 MB" in shown.getvalue()
    assert "/s" in shown.getvalue()
