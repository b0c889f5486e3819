"""Where frames come from: what is accepted, what is refused, and that tiling makes frames that are all different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from xferlib.cli.demo.folder import FolderSource
from xferlib.cli.demo.sample import bundled
from xferlib.cli.demo.source import ArraySource, Source, open_npy
from xferlib.cli.demo.team import Team
from xferlib.cli.demo.tile import TiledSource, check_memory
from xferlib.cli.errors import CommandError


def saved(folder: Path, array: npt.NDArray[Any]) -> Path:
    path = folder / "frames.npy"
    np.save(path, array, allow_pickle=True)
    return path


def read_all(source: Source) -> npt.NDArray[Any]:
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


def test_images_become_grey_and_take_the_size_of_the_first(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / "a.png")
    Image.new("L", (90, 30), 200).save(tmp_path / "b.png")
    (tmp_path / "notes.txt").write_text("no image")
    source = FolderSource(tmp_path)
    assert (source.frames, source.frame_shape, source.dtype.name) == (2, (10, 20), "uint8")
    frames = read_all(source)
    assert set(frames[0].ravel()) == {76}
    assert set(frames[1].ravel()) == {200}


def test_an_image_of_sixteen_bits_is_scaled_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 30000], [60000, 15000]], np.uint16)).save(tmp_path / "a.png")
    assert FolderSource(tmp_path).original(0).tolist() == [[0, 127], [255, 63]]


def test_a_photograph_taken_sideways_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (20, 10)).save(tmp_path / "a.jpg", exif=exif)
    source = FolderSource(tmp_path)
    assert source.frame_shape == (20, 10)
    assert source.original(0).shape == (20, 10)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no image in"):
        FolderSource(tmp_path)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    Image.new("L", (20, 10)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"nothing of the kind")
    with pytest.raises(CommandError, match=r"cannot read the image .*b\.png"):
        FolderSource(tmp_path)


def test_the_pictures_that_come_with_matplotlib_are_pictures() -> None:
    source = bundled()
    frames = read_all(source)
    assert source.frames == 4
    assert frames.dtype == np.uint8
    assert (np.ptp(frames.reshape(4, -1), axis=1) > 180).all()


@pytest.mark.parametrize("shape", [(3, 8, 14), (2, 5, 7, 3), (1, 1, 6), (1, 6, 1)])
def test_tiled_frames_are_rolled_copies_and_no_two_are_alike(shape: tuple[int, ...]) -> None:
    base = ArraySource(np.random.default_rng(5).integers(0, 60000, shape, np.uint16), "base")
    frames = shape[0] * shape[1] * shape[2]
    with Team() as team:
        source = TiledSource(base, frames, team)
    tiled = read_all(source)
    assert len({frame.tobytes() for frame in tiled}) == frames
    for number in range(frames):
        np.testing.assert_array_equal(tiled[number], source.original(number))


def test_fewer_frames_than_there_are_is_a_cut() -> None:
    base = ArraySource(np.arange(4 * 6 * 8, dtype=np.uint8).reshape(4, 6, 8), "base")
    with Team() as team:
        source = TiledSource(base, 2, team)
    np.testing.assert_array_equal(read_all(source), read_all(base)[:2])


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    with pytest.raises(CommandError, match=r"Lower --gib"):
        check_memory(1 << 60)
