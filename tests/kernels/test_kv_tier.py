"""The tier's store keeps what it promises through eviction, restart and damage; its schedule asks for the right pages."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from kernels.kv_tier.disk import HEADER, DiskTier
from kernels.kv_tier.mover import PageMover
from kernels.kv_tier.schedule import Schedule
from kernels.kv_tier.store import Changes, PageStore, page_key
from kernels.pages.pool import make_pool

PAGE = 24


def key(number: int) -> bytes:
    """Return the key of page `number`."""
    return page_key(number.to_bytes(4, "big"), "v1")


def page(number: int) -> torch.Tensor:
    """Return the bytes of page `number`."""
    return torch.arange(PAGE, dtype=torch.uint8) + number


def put(store: PageStore, *numbers: int) -> None:
    store.put([key(n) for n in numbers], torch.stack([page(n) for n in numbers]))


def disk(folder: Path, pages: int) -> DiskTier:
    return DiskTier(folder, PAGE, pages * (PAGE + HEADER.size) + 5)


def test_a_key_depends_on_tokens_and_weights():
    keys = {page_key(block_hash, salt) for block_hash in (b"a", b"ab", b"b") for salt in ("", "1", "b1")}
    assert len(keys) == 9
    assert all(len(k) == 32 for k in keys)


def test_least_recently_used_leaves_ram_for_disk_and_disk_for_nothing(tmp_path):
    store = PageStore(PAGE, 2 * PAGE + 1, disk(tmp_path, 2))
    put(store, 1, 2)
    assert torch.equal(store.get(key(1)), page(1))  # 2 is the oldest now
    put(store, 3)  # 2 to disk
    assert (key(1) in store.disk, key(2) in store.disk) == (False, True)
    put(store, 4)  # 1 to disk
    assert [k for k in map(key, range(1, 5)) if k in store.disk] == [key(1), key(2)]
    assert torch.equal(store.get(key(2)), page(2))  # back into RAM; 3 would go to disk, where 1 is the oldest
    assert [n for n in range(1, 5) if key(n) in store] == [2, 3, 4]
    assert store.get(key(1)) is None
    changes = store.take_changes()
    assert (changes.added, changes.removed) == ({key(2), key(3), key(4)}, {key(1)})
    assert vars(store.counts) == {"put": 4, "memory_hits": 1, "disk_hits": 1, "misses": 1, "spilled": 3, "dropped": 1}


def test_a_page_on_its_way_back_is_not_lost(tmp_path):
    """It comes into RAM while the page that makes room for it takes its place on disk."""
    store = PageStore(PAGE, PAGE, disk(tmp_path, 1))
    put(store, 1)
    put(store, 2)
    store.take_changes()
    assert torch.equal(store.get(key(1)), page(1))
    assert list(store.disk) == [key(2)]
    changes = store.take_changes()
    assert key(1) not in changes.removed
    assert (key(1) in store, key(2) in store, store.counts.dropped) == (True, True, 0)


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    ram=st.integers(1, 3),
    on_disk=st.integers(0, 3),
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "restart"]), st.integers(0, 7)), max_size=40),
)
def test_store_equals_a_model(tmp_path_factory, ram, on_disk, steps):
    """Any order of puts, gets and restarts gives what two ordered dictionaries give."""
    folder = tmp_path_factory.mktemp("tier")
    in_ram, kept, known = OrderedDict(), OrderedDict(), set()

    def fresh() -> PageStore:
        return PageStore(PAGE, ram * PAGE, disk(folder, on_disk) if on_disk else None)

    def spill(n: int) -> None:
        if on_disk:
            if n not in kept and len(kept) == on_disk:
                kept.popitem(last=False)
            kept[n] = None
            kept.move_to_end(n)

    def bring(n: int) -> None:
        if len(in_ram) == ram:
            spill(in_ram.popitem(last=False)[0])
        in_ram[n] = None

    store = fresh()
    for action, n in steps:
        if action == "restart":
            store.close()
            for m in in_ram:
                spill(m)
            in_ram.clear()
            store, known = fresh(), set()
        elif action == "put":
            put(store, n)
            if n in in_ram:
                in_ram.move_to_end(n)
            else:
                bring(n)
        else:
            found = store.get(key(n))
            assert (found is not None) == (n in in_ram or n in kept)
            assert found is None or torch.equal(found, page(n))
            if n in in_ram:
                in_ram.move_to_end(n)
            elif n in kept:
                kept.move_to_end(n)
                bring(n)
        changes = store.take_changes()
        known = (known | changes.added) - changes.removed
        assert known == {key(m) for m in (*in_ram, *kept)}
        assert len(list(folder.glob("*.page"))) == len(kept)
    store.close()


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "foreign", "gone"])
def test_a_damaged_file_is_a_miss_and_goes_away(tmp_path, damage, caplog):
    tier = disk(tmp_path, 3)
    for n in (1, 2):
        tier.put(key(n), memoryview(page(n).numpy()))
    path = tmp_path / f"{key(1).hex()}.page"
    content = bytearray(path.read_bytes())
    content[HEADER.size + 7] ^= damage == "flipped"
    if damage == "foreign":
        content = bytearray((tmp_path / f"{key(2).hex()}.page").read_bytes())
    path.write_bytes({"short": content[:-1], "long": content + b"x"}.get(damage, content))
    if damage == "gone":
        path.unlink()
    assert tier.get(key(1)) is None
    assert key(1) not in tier
    assert not path.exists()
    assert tier.num_corrupt == 1
    assert "computed again" in caplog.text
    assert tier.get(key(2)) == page(2).numpy().tobytes()


def test_files_of_others_are_left_alone(tmp_path, caplog):
    """Whatever their size or suffix, also where a page's name is a folder or a link."""
    tmp_path.joinpath("notes.page").write_bytes(b"short")
    tmp_path.joinpath("film.partial").write_bytes(b"half a film")
    tmp_path.joinpath("abcd.page").mkdir()
    tmp_path.joinpath("abce.page").symlink_to("notes.page")
    tier = disk(tmp_path, 3)
    assert list(tier) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "abcd.page",
        "abce.page",
        "film.partial",
        "lock",
        "notes.page",
    ]
    assert caplog.text.count("left alone") == 4


def test_half_written_files_and_strangers_do_not_survive_or_matter(tmp_path):
    tier = disk(tmp_path, 3)
    tier.put(key(1), memoryview(page(1).numpy()))
    tier.close()
    (tmp_path / f"{key(2).hex()}.partial").write_bytes(b"half")
    (tmp_path / f"{key(3).hex()}.page").write_bytes(b"too short")
    (tmp_path / "notes.page").write_bytes(bytes(PAGE + HEADER.size))
    tier = disk(tmp_path, 3)
    assert list(tier) == [key(1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{key(1).hex()}.page", "notes.page", "lock"])


KILLED = """
import os, sys
from pathlib import Path
from kernels.kv_tier import disk
tier = disk.DiskTier(Path(sys.argv[1]), 24, 10**6)
tier.put(b"a" * 32, memoryview(bytes(24)))
Path.rename = lambda *_: os._exit(9)  # dies between writing and renaming
tier.put(b"b" * 32, memoryview(bytes(24)))
"""


def test_a_killed_writer_leaves_whole_pages_only(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 9
    assert len(list(tmp_path.glob("*.partial"))) == 1
    tier = DiskTier(tmp_path, 24, 10**6)
    assert list(tier) == [b"a" * 32]
    assert tier.get(b"a" * 32) == bytes(24)
    assert not list(tmp_path.glob("*.partial"))


ENDLESS = """
import itertools, sys
from pathlib import Path
from kernels.kv_tier import disk
tier = disk.DiskTier(Path(sys.argv[1]), 2**18, 7 * 2**18)
for n in itertools.count():
    tier.put(n.to_bytes(32, "big"), memoryview(bytes([n % 251]) * 2**18))
    if n == 8:
        print("busy", flush=True)
"""


def test_killed_at_any_moment_it_keeps_whole_pages_within_the_bound(tmp_path):
    for attempt in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"busy\n"
        with pytest.raises(ValueError, match="owned by another process"):
            DiskTier(tmp_path, 2**18, 7 * 2**18)
        time.sleep(0.003 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        tier = DiskTier(tmp_path, 2**18, 7 * 2**18)
        keys = list(tier)
        assert 4 <= len(keys) <= 6
        for name in keys:
            assert tier.get(name) == bytes([int.from_bytes(name, "big") % 251]) * 2**18
        assert tier.num_corrupt == 0
        assert len(list(tmp_path.iterdir())) == len(keys) + 1
        tier.clear()
        tier.close()


def test_order_of_use_and_bound_survive_a_restart(tmp_path):
    tier = disk(tmp_path, 4)
    for at, n in enumerate((1, 2, 3)):
        tier.put(key(n), memoryview(page(n).numpy()))
        os.utime(tmp_path / f"{key(n).hex()}.page", ns=(at, at))
    tier.get(key(1))
    tier.close()
    tier = disk(tmp_path, 2)
    assert list(tier) == [key(3), key(1)]


def test_a_folder_has_one_owner(tmp_path):
    owner = disk(tmp_path, 2)
    with pytest.raises(ValueError, match="owned by another process"):
        disk(tmp_path, 2)
    owner.close()
    disk(tmp_path, 2).close()


def test_a_disk_that_refuses_loses_the_page_and_says_so(tmp_path, monkeypatch, caplog):
    store = PageStore(PAGE, PAGE, disk(tmp_path, 2))
    put(store, 1)
    store.take_changes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    put(store, 2)
    assert "No space left" in caplog.text
    assert store.disk.num_failed_writes == 1
    changes = store.take_changes()
    assert (changes.added, changes.removed) == ({key(2)}, {key(1)})
    assert torch.equal(store.get(key(2)), page(2))
    assert not list(tmp_path.glob("*.partial"))


def test_a_disk_that_is_full_in_the_middle_of_a_page(tmp_path, caplog):
    """Really: the system refuses to let the file grow past its header."""
    tier = disk(tmp_path, 3)
    tier.put(key(1), memoryview(page(1).numpy()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER.size + 5, limits[1]))
        assert tier.put(key(2), memoryview(page(2).numpy())) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (list(tier), tier.num_failed_writes) == ([key(1)], 1)
    assert "cannot be written" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["lock", f"{key(1).hex()}.page"])
    tier.put(key(2), memoryview(page(2).numpy()))
    assert tier.get(key(2)) == page(2).numpy().tobytes()


def test_a_page_that_vanished_is_written_again(tmp_path):
    tier = disk(tmp_path, 3)
    for _ in range(2):
        tier.put(key(1), memoryview(page(1).numpy()))
        (tmp_path / f"{key(1).hex()}.page").unlink()
    tier.put(key(1), memoryview(page(1).numpy()))
    assert tier.get(key(1)) == page(1).numpy().tobytes()
    assert tier.num_corrupt == 2


def test_a_file_that_cannot_be_removed_stops_nothing(tmp_path, monkeypatch, caplog):
    tier = disk(tmp_path, 1)
    tier.put(key(1), memoryview(page(1).numpy()))

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert tier.put(key(2), memoryview(page(2).numpy())) == [key(1)]
    assert "cannot be removed" in caplog.text
    assert list(tier) == [key(2)]
    monkeypatch.setattr(os, "utime", refuse)
    assert tier.get(key(2)) == page(2).numpy().tobytes()


def test_descriptors_do_not_leak_and_a_closed_folder_is_not_written(tmp_path):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    store = PageStore(PAGE, 2 * PAGE, disk(tmp_path, 2))
    tier = store.disk
    put(store, 1, 2, 3, 4)
    for n in (1, 2, 3, 4, 5):
        store.get(key(n))
    store.close()
    store.close()
    assert descriptors() == before
    with pytest.raises(ValueError, match="was given up by close"):
        tier.put(key(9), memoryview(page(9).numpy()))
    with pytest.raises(ValueError, match="owned by another"):
        owner = disk(tmp_path, 2)
        try:
            disk(tmp_path, 2)
        finally:
            owner.close()
    assert descriptors() == before


def test_clear_forgets_everything(tmp_path):
    store = PageStore(PAGE, PAGE, disk(tmp_path, 2))
    put(store, 1, 2)
    store.take_changes()
    store.clear()
    assert store.take_changes().removed == {key(1), key(2)}
    assert key(1) not in store
    assert not list(tmp_path.glob("*.page"))
    put(store, 3)
    assert torch.equal(store.get(key(3)), page(3))


def test_sizes_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="ram_bytes=23: must hold at least one page of 24"):
        PageStore(PAGE, 23)
    with pytest.raises(ValueError, match="must hold one page"):
        DiskTier(tmp_path, PAGE, PAGE)
    with pytest.raises(ValueError, match="pages of 24 bytes; must be 25"):
        PageStore(PAGE + 1, 100, disk(tmp_path, 1))
    with pytest.raises(ValueError, match=r"pages_NW: torch.uint8 \(1, 3\); must be uint8 \(1, 24\)"):
        PageStore(PAGE, PAGE).put([b"k"], torch.zeros(1, 3, dtype=torch.uint8))


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_mover_takes_pages_out_and_brings_them_back(rng, chunk):
    memory = torch.randint(0, 256, (2, 9, 5, 8), dtype=torch.uint8, generator=rng)
    before = memory.clone()
    mover = PageMover(make_pool(list(memory)), chunk)
    blocks = [7, 0, 3, 8, 2]
    rows = [row.clone() for part, rows_NW in mover.read(blocks) for row in rows_NW]
    for row, block in zip(rows, blocks, strict=True):
        assert torch.equal(row, before[:, block].flatten())
    mover.write([1, 2, 4, 5, 6], rows)
    before[:, [1, 2, 4, 5, 6]] = before[:, blocks]
    assert torch.equal(memory, before)


def hashes(*numbers: int) -> list[bytes]:
    return [bytes([n]) * 32 for n in numbers]


def stored(plan) -> list[tuple[bytes, int]]:
    return [pair for move in plan.stores for pair in zip(move.keys, move.blocks, strict=True)]


def test_a_prompt_is_stored_block_by_block_and_found_by_the_next():
    schedule = Schedule(block_size=4, num_workers=2)
    first, second, third = (page_key(h, "7") for h in hashes(1, 2, 3))
    schedule.track("a", "7", hashes(1, 2))
    assert schedule.match("a", 11, 0) == 0
    schedule.accept("a", 0)
    plan = schedule.plan({"a": ([5, 6, 9], 6)})  # a chunk of the prompt: one block is full
    assert (stored(plan), plan.loads) == ([(first, 5)], [])
    schedule.update(0, 0, Changes(added={first}))
    assert schedule.match("a", 11, 0) == 0  # the other worker does not have it
    plan = schedule.plan({"a": ([5, 6, 9], 11)})
    assert stored(plan) == [(second, 6)]
    schedule.track("a", "7", hashes(1, 2, 3))
    assert stored(schedule.plan({"a": ([5, 6, 9], 12)})) == [(third, 9)]
    for worker in (0, 1):
        schedule.update(worker, 0, Changes(added={first, second, third}))
    schedule.track("b", "7", hashes(1, 2, 3))
    assert schedule.match("b", 12, 0) == 8  # the last token is always computed
    assert schedule.match("b", 13, 4) == 8
    schedule.accept("b", 8)
    plan = schedule.plan({"b": ([1, 2, 3, 4], 13)})
    assert [(move.keys, move.blocks) for move in plan.loads] == [((second, third), (2, 3))]
    assert stored(plan) == []  # all three are known
    schedule.track("c", "8", hashes(1, 2, 3))
    assert schedule.match("c", 13, 0) == 0  # other weights


def test_an_offer_that_is_not_taken_is_not_loaded():
    schedule = Schedule(4, 1)
    schedule.update(0, 0, Changes(added={page_key(h, "") for h in hashes(1)}))
    schedule.track("a", "", hashes(1))
    assert schedule.match("a", 9, 0) == 4
    assert schedule.plan({}).loads == []  # no room in this step
    assert schedule.match("a", 9, 0) == 4
    schedule.accept("a", 4)
    schedule.finish("a")
    assert schedule.plan({}).loads == []


def test_two_requests_with_one_prefix_store_it_once():
    schedule = Schedule(2, 1)
    for name in "ab":
        schedule.track(name, "", hashes(1))
    assert len(stored(schedule.plan({"a": ([3], 2), "b": ([4], 2)}))) == 1


def test_a_reset_stops_old_requests_and_old_reports():
    schedule = Schedule(2, 1)
    schedule.track("old", "", hashes(1, 2))
    [(first, _)] = stored(schedule.plan({"old": ([3], 2)}))
    schedule.reset()
    schedule.update(0, 0, Changes(added={first}))  # was on its way
    schedule.track("new", "", hashes(1))
    assert schedule.match("new", 5, 0) == 0
    plan = schedule.plan({"old": ([3, 4], 4), "new": ([5], 2)})
    assert plan.epoch == 1
    assert stored(plan) == [(first, 5)]  # of the new request; the old one's second block mixes two versions
    schedule.update(0, 1, Changes(added={first}))
    assert schedule.match("new", 5, 0) == 2
