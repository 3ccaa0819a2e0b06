"""Shards of a state, brought together from the disks of several machines and handed out again."""

from hypothesis import given
from hypothesis import strategies as st

from kitestring_trainer.verl_backend import shards

SIZE = 4


def write(folder, contents):
    """`contents[rank]` are the files of a rank."""
    for rank, files in enumerate(contents):
        for number, data in enumerate(files):
            path = folder / "actor" / f"part{number}_world_size_{len(contents)}_rank_{rank}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def read(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.pt")}


FILES = st.lists(st.lists(st.binary(max_size=13), max_size=3), min_size=1, max_size=12)


@given(contents=FILES, own=st.integers(0, 11))
def test_what_is_collected_is_what_was_written(tmp_path_factory, contents, own):
    """Each rank has a disk of its own; that of `own` is the driver's. Ranks 1 and 11 are not confused."""
    root = tmp_path_factory.mktemp("disks")
    disks = [root / ("driver" if rank == own else f"disk-{rank}") for rank in range(len(contents))]
    for rank, files in enumerate(contents):
        write(disks[rank], [[]] * rank + [files] + [[]] * (len(contents) - rank - 1))
    driver = root / "driver"
    driver.mkdir(exist_ok=True)

    def send(number):
        return [None if rank == own else shards.read_chunk(disk, rank, number, SIZE) for rank, disk in enumerate(disks)]

    shards.collect(driver, send)
    whole = {}
    for disk in {*disks}:
        whole |= read(disk)
    assert read(driver) == whole

    again = [root / f"again-{rank}" for rank in range(len(contents))]

    def take(chunks):
        for rank, chunk in enumerate(chunks):
            if chunk is not None:
                shards.write_chunk(again[rank], chunk)

    shards.hand_out(driver, [rank != own for rank in range(len(contents))], take)
    handed = {}
    for rank, folder in enumerate(again):
        found = read(folder)
        assert {name.endswith(f"_rank_{rank}.pt") for name in found} <= {True}
        handed |= found
    assert handed == {name: data for name, data in whole.items() if not name.endswith(f"_rank_{own}.pt")}


def test_a_probe_tells_whether_a_folder_is_the_same(tmp_path):
    with shards.Probe(tmp_path / "state") as probe:
        assert probe.parent == tmp_path / "state" and probe.exists()
    assert not probe.exists()
