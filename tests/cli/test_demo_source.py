"""Where frames come from: what is accepted, what is refused, and that tiling makes frames that are all different."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import xferlib
from xferlib.cli.command_error import CommandError
from xferlib.cli.demo.options import PINNED_SHARE, Options, check_memory, plan
from xferlib.cli.demo.pictures import bundled, open_folder, open_image
from xferlib.cli.demo.source import FrameSource, from_array, open_npy, tiled


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(3) as executor:
        yield executor


def saved(folder: Path, array: npt.NDArray[Any]) -> Path:
    path = folder / "frames.npy"
    np.save(path, array, allow_pickle=True)
    return path


def read_all(source: FrameSource) -> npt.NDArray[Any]:
    out = np.empty((source.frames, *source.frame_shape), source.dtype)
    source.read(0, out)
    return out


@pytest.mark.parametrize(
    "array",
    [
        np.arange(120, dtype=np.uint8).reshape(2, 6, 10),
        np.arange(120, dtype=">u2").reshape(2, 6, 10),
        np.asfortranarray(np.arange(120, dtype=np.float32).reshape(2, 6, 10)),
        np.arange(240, dtype=np.int16).reshape(2, 6, 5, 4),
    ],
    ids=["bytes", "big-endian", "fortran order", "channels"],
)
def test_a_npy_file_is_read_as_it_is_in_native_byte_order(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    source = open_npy(saved(tmp_path, array))
    assert source.dtype.isnative
    np.testing.assert_array_equal(read_all(source), array)
    np.testing.assert_array_equal(source.original(1), array[1])


def test_an_array_of_two_axes_is_one_frame(tmp_path: Path) -> None:
    source = open_npy(saved(tmp_path, np.ones((6, 10))))
    assert (source.frames, source.frame_shape) == (1, (6, 10))


def test_a_read_begins_where_it_is_told(tmp_path: Path) -> None:
    array = np.arange(5 * 6 * 10, dtype=np.uint16).reshape(5, 6, 10)
    out = np.empty((2, 6, 10), np.uint16)
    open_npy(saved(tmp_path, array)).read(2, out)
    np.testing.assert_array_equal(out, array[2:4])


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_that_is_cut_off_after_it_was_opened_is_refused_by_whoever_reads(
    tmp_path: Path, dtype: str, order: Literal["C", "F"]
) -> None:
    path = saved(tmp_path, np.ones((8, 64, 64), dtype, order))
    source = open_npy(path)
    os.truncate(path, 100)
    with pytest.raises(CommandError, match="was cut off while it was read"):
        read_all(source)
    with pytest.raises(CommandError, match="was cut off while it was read"):
        source.original(7)


def test_frames_may_be_read_to_where_they_do_not_lie_one_behind_the_other(tmp_path: Path) -> None:
    array = np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6)
    wide = np.zeros((4, 5, 6, 2), np.uint8)
    open_npy(saved(tmp_path, array)).read(0, wide[..., 0])
    np.testing.assert_array_equal(wide[..., 0], array)
    assert not wide[..., 1].any()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[object()]]), "Python objects"),
        (np.zeros((2, 6, 10), np.complex64), "dtype 'complex64': expected one of uint8"),
        (np.zeros((2, 6, 10), np.int64), "dtype 'int64'"),
        (np.zeros((2, 6, 10), [("x", "u1")]), "dtype"),
        (np.zeros(5, np.uint8), "shape (5,): expected (N, H, W)"),
        (np.zeros((2, 6, 10, 5), np.uint8), "shape (2, 6, 10, 5)"),
        (np.zeros((0, 6, 10), np.uint8), "no frame"),
        (np.zeros((6, 10, 3), np.uint8), "save array[None]"),
    ],
)
def test_an_array_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path, array: npt.NDArray[Any], words: str) -> None:
    with pytest.raises(CommandError) as refusal:
        open_npy(saved(tmp_path, array))
    assert words in str(refusal.value)


def test_a_file_that_is_no_npy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.npy"
    path.write_text("not an array")
    with pytest.raises(CommandError, match=r"cannot read .*notes.npy"):
        open_npy(path)


def test_a_truncated_npy_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, np.zeros((2, 60, 100), np.uint8))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CommandError, match="cannot read"):
        open_npy(path)


@pytest.mark.parametrize("header", [b"", b" " * 20000], ids=["of another kind", "too long"])
def test_what_is_no_npy_never_advises_to_run_what_is_in_it(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "notes.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header if header else b"something else")
    with pytest.raises(CommandError, match="cannot read") as refusal:
        open_npy(path)
    assert "pickle" not in str(refusal.value)


def test_several_arrays_in_one_file_are_refused_with_what_to_do(tmp_path: Path) -> None:
    np.savez(tmp_path / "several.npz", first=np.ones(3))
    with pytest.raises(CommandError, match="is an archive of arrays"):
        open_npy(tmp_path / "several.npz")


def test_images_become_grey_and_take_the_size_of_the_first(tmp_path: Path, pool: Executor) -> None:
    Image.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / "a.png")
    Image.new("L", (90, 30), 200).save(tmp_path / "b.png")
    (tmp_path / "notes.txt").write_text("no image")
    source = open_folder(tmp_path, pool)
    assert (source.frames, source.frame_shape, source.dtype.name) == (2, (10, 20), "uint8")
    assert (source.skipped, source.subfolders) == ({}, ())
    frames = read_all(source)
    assert set(frames[0].ravel()) == {76}
    assert set(frames[1].ravel()) == {200}


def test_one_image_is_one_frame(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / "a.png")
    source = open_image(tmp_path / "a.png")
    assert (source.label, source.frames, source.frame_shape) == ("a.png", 1, (10, 20))
    assert set(read_all(source).ravel()) == set(source.original(0).ravel()) == {76}


def test_an_image_of_sixteen_bits_is_scaled_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 30000], [60000, 15000]], np.uint16)).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").original(0).tolist() == [[0, 127], [255, 63]]


def test_a_photograph_taken_sideways_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (20, 10)).save(tmp_path / "a.jpg", exif=exif)
    source = open_image(tmp_path / "a.jpg")
    assert source.frame_shape == (20, 10)
    assert source.original(0).shape == (20, 10)


def test_an_empty_folder_is_refused(tmp_path: Path, pool: Executor) -> None:
    with pytest.raises(CommandError, match="there is no image in"):
        open_folder(tmp_path, pool)


def test_a_folder_of_nothing_but_folders_is_refused_with_what_to_name(tmp_path: Path, pool: Executor) -> None:
    (tmp_path / "cats").mkdir()
    with pytest.raises(CommandError, match="subfolders are not looked into: name one of them, such as 'cats'"):
        open_folder(tmp_path, pool)


def cut(file: Path) -> None:
    """Leave an image its header, and half of what comes after it."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def test_images_that_cannot_be_read_are_skipped_and_named(tmp_path: Path, pool: Executor) -> None:
    noise = Image.fromarray(np.random.default_rng(8).integers(0, 256, (64, 64), np.uint8))
    for name in ("a.png", "b.jpg", "c.png"):
        noise.save(tmp_path / name)
    cut(tmp_path / "b.jpg")
    (tmp_path / "0.png").write_bytes(b"nothing of the kind")
    for folder in ("more", ".hidden"):
        (tmp_path / folder).mkdir()
    source = open_folder(tmp_path, pool)
    assert (source.frames, source.frame_shape) == (2, (64, 64))
    assert set(source.skipped) == {"0.png", "b.jpg"}
    assert "truncated" in source.skipped["b.jpg"]
    assert source.subfolders == ("more",)
    np.testing.assert_array_equal(read_all(source), [np.asarray(noise)] * 2)


def test_what_pillow_writes_and_cannot_read_is_no_image(tmp_path: Path, pool: Executor) -> None:
    noise = Image.new("L", (20, 10))
    noise.save(tmp_path / "a.png")
    noise.save(tmp_path / "b.pdf")
    assert open_folder(tmp_path, pool).skipped == {}


def test_a_folder_without_an_image_that_can_be_read_is_refused(tmp_path: Path, pool: Executor) -> None:
    (tmp_path / "b.png").write_bytes(b"nothing of the kind")
    with pytest.raises(CommandError, match=r"none of 1 image in .* can be read: .*b\.png"):
        open_folder(tmp_path, pool)


@pytest.mark.parametrize("whole", [True, False], ids=["cut off", "no image at all"])
def test_one_image_that_cannot_be_read_is_refused(tmp_path: Path, whole: bool) -> None:
    path = tmp_path / "b.jpg"
    Image.fromarray(np.random.default_rng(8).integers(0, 256, (64, 64), np.uint8)).save(path)
    cut(path)
    if not whole:
        path.write_bytes(b"nothing of the kind")
    with pytest.raises(CommandError, match=r"cannot read .*b\.jpg' as an image"):
        open_image(path)


def test_the_pictures_that_come_with_matplotlib_are_pictures() -> None:
    source = bundled()
    frames = read_all(source)
    assert source.frames == 4
    assert frames.dtype == np.uint8
    assert (np.ptp(frames.reshape(4, -1), axis=1) > 180).all()


@pytest.mark.parametrize("shape", [(3, 8, 14), (2, 5, 7, 3), (1, 1, 6), (1, 6, 1)])
def test_tiled_frames_are_rolled_copies_and_no_two_are_alike(shape: tuple[int, ...], pool: Executor) -> None:
    base = from_array(np.random.default_rng(5).integers(0, 60000, shape, np.uint16), "base")
    frames = shape[0] * shape[1] * shape[2]
    source = tiled(base, frames, pool)
    made = read_all(source)
    assert len({frame.tobytes() for frame in made}) == frames
    for number in range(frames):
        np.testing.assert_array_equal(made[number], source.original(number))


def test_the_last_time_round_may_be_cut_short(pool: Executor) -> None:
    base = from_array(np.arange(3 * 5 * 7, dtype=np.uint8).reshape(3, 5, 7), "base")
    source = tiled(base, 8, pool)
    np.testing.assert_array_equal(read_all(source), [source.original(number) for number in range(8)])


def test_fewer_frames_than_there_are_is_a_cut(pool: Executor) -> None:
    base = from_array(np.arange(4 * 6 * 8, dtype=np.uint8).reshape(4, 6, 8), "base")
    source = tiled(base, 2, pool)
    np.testing.assert_array_equal(read_all(source), read_all(base)[:2])


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    with pytest.raises(CommandError, match=r"Lower --gib"):
        check_memory(1 << 60)


@pytest.mark.parametrize("pinned_limit", [1 << 20, 64 << 20])
def test_there_are_twice_as_many_batches_as_slots_and_the_slots_fit_under_the_limit(tmp_path: Path, pinned_limit: int) -> None:
    source = from_array(np.zeros((600, 64, 64), np.uint8), "nothing")
    options = Options(
        path=tmp_path,
        backend="host",
        device=0,
        gib=None,
        out=tmp_path,
        json_file=None,
        batch_mib=None,
        depth=3,
        threads=2,
        rounds=1,
        sheet=False,
    )
    with xferlib.stager("host", pinned_limit=pinned_limit) as stager:
        frames, spec = plan(options, source, stager)
    slots = options.depth + options.threads
    room = PINNED_SHARE * pinned_limit
    assert frames == 600
    # One more frame in each would be too many, for the one reason or the other.
    assert spec.frames == min(600 // (2 * slots), int(room / (slots * spec.frame_nbytes)))
