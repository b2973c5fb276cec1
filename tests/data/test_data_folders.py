"""Folders of images as Data: one folder per class, images beside masks, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.data import Data, LazySplit

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)


def draw(file: Path, size: tuple[int, int] = (6, 5), grey: bool = False) -> np.ndarray:
    pixels = RNG.integers(0, 255, size if grey else (*size, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return pixels


def mask(file: Path, numbers: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numbers).save(file)


@pytest.fixture
def animals(tmp_path: Path) -> tuple[Path, dict[str, list[np.ndarray]]]:
    root = tmp_path / "animals"
    return root, {name: [draw(root / name / f"{i}.png") for i in range(10)] for name in ("cat", "dog")}


def test_a_folder_is_a_class(animals: tuple[Path, dict[str, list[np.ndarray]]]) -> None:
    root, pixels = animals
    (root / "cat" / "notes.txt").write_text("no image")
    data = Data.from_folder(root, test=[0, 10])
    assert data.classes == ("cat", "dog")
    assert data.name == "animals"
    assert [column.name for column in data.features] == ["red", "green", "blue"]
    expected = torch.from_numpy(np.stack([*pixels["cat"][1:], *pixels["dog"][1:]])).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(data.train.x, expected)
    assert data.train.y.tolist() == [0] * 9 + [1] * 9
    assert any("1 files that are not images" in note for note in data.card.notes)
    lazy = Data.from_folder(str(root), lazy=True, classes=["dog", "cat"], size=4)
    assert isinstance(lazy.train, LazySplit)
    assert lazy.input_shape == (3, 4, 4)
    labels = lazy.train.labels
    assert labels is not None
    assert torch.bincount(labels).tolist() == [8, 8]
    assert torch.equal(lazy.train.y, labels)


def test_folders_train_and_test_are_the_parts(tmp_path: Path) -> None:
    for part, n in (("train", 4), ("test", 2), ("val", 3)):
        for name in ("a", "b"):
            for i in range(n):
                draw(tmp_path / part / name / f"{i}.jpg", grey=True)
    data = Data.from_folder(tmp_path)
    assert (len(data.train), len(data.test), data.input_shape) == (8, 4, (1, 6, 5))
    assert any("val is left out" in note for note in data.card.notes)


@pytest.mark.parametrize("layout", ["images/{}.jpg masks/{}.png", "{}.jpg {}_mask.png", "rgb/{}.jpg truth/{}.png"])
def test_images_stand_beside_masks(tmp_path: Path, layout: str) -> None:
    numbers = [RNG.integers(0, 3, (6, 5)).astype(np.uint8) for _ in range(8)]
    image_at, mask_at = layout.split()
    for i, values in enumerate(numbers):
        values[0, 0], values[1, 1] = 255, 2
        draw(tmp_path / image_at.format(i))
        mask(tmp_path / mask_at.format(i), values)
    root, masks = (tmp_path / "rgb", tmp_path / "truth") if "rgb" in layout else (tmp_path, None)
    data = Data.from_folder(root, masks=masks, void=255, test=[0])
    expected = torch.from_numpy(np.stack(numbers[1:])).long()
    assert torch.equal(data.train.y, expected.masked_fill(expected == 255, -100))
    assert data.n_outputs == 3
    with pytest.raises(ValueError, match=r"does 255 mean no class \(void=255\)"):
        Data.from_folder(root, masks=masks)


def test_masks_of_0_and_255_are_two_classes_if_they_are_said_to_be(tmp_path: Path) -> None:
    for i in range(5):
        draw(tmp_path / "images" / f"{i}.png", (8, 8))
        mask(tmp_path / "masks" / f"{i}.png", np.where(np.eye(8), 255, 0).astype(np.uint8))
    data = Data.from_folder(tmp_path, classes={0: "background", 255: "object"}, size=(4, 4))
    assert data.classes == ("background", "object")
    assert torch.equal(data.train.y[0], torch.eye(4).long())


def test_masks_of_floating_point_numbers_are_values(tmp_path: Path) -> None:
    depth = RNG.random((5, 6, 5)).astype(np.float32)
    for i in range(5):
        draw(tmp_path / "images" / f"{i}.png")
        mask(tmp_path / "depth" / f"{i}.tiff", depth[i])
    data = Data.from_folder(tmp_path, test=[0])
    assert data.task == "regression"
    assert torch.equal(data.train.y, torch.from_numpy(depth[1:]))


def test_sixteen_bits_are_scaled_in_images_and_ask_for_a_task_in_masks(tmp_path: Path) -> None:
    deep = RNG.integers(0, 65535, (5, 6, 5)).astype(np.uint16)
    for i in range(5):
        mask(tmp_path / "images" / f"{i}.png", deep[i])
        mask(tmp_path / "masks" / f"{i}.png", deep[i])
    with pytest.raises(ValueError, match=r"values such as depths \(task='regression'\)"):
        Data.from_folder(tmp_path)
    data = Data.from_folder(tmp_path, task="regression", test=[0])
    torch.testing.assert_close(data.train.x[:, 0], torch.from_numpy(deep[1:].astype(np.float32) / 65535))
    assert torch.equal(data.train.y, torch.from_numpy(deep[1:].astype(np.float32)))


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Data.from_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="neither images nor folders; expected a folder for each class"):
        Data.from_folder(tmp_path)
    for i in range(3):
        draw(tmp_path / "images" / f"{i}.png")
        mask(tmp_path / "masks" / f"{i}.png", np.zeros((6, 5), np.uint8))
    draw(tmp_path / "images" / "9.png")
    with pytest.raises(ValueError, match=r"1 of 4 images have no mask, such as .*9\.png"):
        Data.from_folder(tmp_path)
    (tmp_path / "images" / "9.png").unlink()
    mask(tmp_path / "masks" / "8.png", np.zeros((6, 5), np.uint8))
    with pytest.raises(ValueError, match=r"1 masks belong to no image, such as .*8\.png"):
        Data.from_folder(tmp_path)
    (tmp_path / "masks" / "8.png").unlink()
    mask(tmp_path / "masks" / "2.png", np.zeros((5, 5), np.uint8))
    with pytest.raises(ValueError, match=r"2\.png: it has 6 x 5 pixels, and its mask 2\.png 5 x 5"):
        Data.from_folder(tmp_path)
    mask(tmp_path / "masks" / "2.png", np.zeros((6, 5, 3), np.uint8))
    with pytest.raises(ValueError, match="holds colours; give the number of the class"):
        Data.from_folder(tmp_path)


def test_images_of_another_size_and_damaged_ones_are_named(animals: tuple[Path, dict]) -> None:
    root, _ = animals
    draw(root / "dog" / "large.png", (9, 9))
    with pytest.raises(ValueError, match=r"\.png has \d x \d pixels, and .*\.png \d x \d: give size=\(height, width\)"):
        Data.from_folder(root)
    assert Data.from_folder(root, size=6).input_shape == (3, 6, 6)
    (root / "dog" / "large.png").write_bytes(b"\x89PNG damaged")
    with pytest.raises(ValueError, match=r"large\.png can't be read as an image"):
        Data.from_folder(root)
    (root / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty should be the folder of a class"):
        Data.from_folder(root)


def test_colours_among_grey_images_are_kept_wherever_they_stand(tmp_path: Path) -> None:
    for i in range(25):
        draw(tmp_path / "train" / "a" / f"{i:02}.png", grey=True)
        draw(tmp_path / "train" / "b" / f"{i:02}.png", grey=True)
        draw(tmp_path / "test" / "a" / f"{i:02}.png", grey=True)
    pixels = draw(tmp_path / "test" / "b" / "0.png")
    data = Data.from_folder(tmp_path)
    assert data.input_shape == (3, 6, 5)
    torch.testing.assert_close(data.test.x[-1], torch.from_numpy(pixels).permute(2, 0, 1) / 255)


def draw_turned(file: Path, stored: np.ndarray, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(stored).save(file, exif=exif)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_images_are_upright_as_their_exif_tag_says(tmp_path: Path, suffix: str) -> None:
    upright = RNG.integers(0, 255, (6, 5, 3), dtype=np.uint8)
    # what is stored, by the orientation that makes a viewer show it upright
    stored = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 6: np.rot90(upright), 8: np.rot90(upright, -1)}
    for orientation, pixels in stored.items():
        for name in ("a", "b"):
            draw_turned(tmp_path / name / f"{orientation}.{suffix}", np.ascontiguousarray(pixels), orientation)
    data = Data.from_folder(tmp_path)
    expected = (torch.from_numpy(upright).permute(2, 0, 1) / 255).expand(len(data.train), -1, -1, -1)
    torch.testing.assert_close(data.train.x, expected)


def test_a_mask_whose_image_is_turned_must_say_which_way_up_it_is(tmp_path: Path) -> None:
    upright, numbers = RNG.integers(0, 255, (6, 5, 3), dtype=np.uint8), RNG.integers(0, 3, (6, 5)).astype(np.uint8)
    numbers[0, 0] = 2
    for i in range(5):  # quarter turns: the sizes tell that the masks are upright
        draw_turned(tmp_path / "images" / f"{i}.png", np.ascontiguousarray(np.rot90(upright)), 6)
        mask(tmp_path / "masks" / f"{i}.png", numbers)
    data = Data.from_folder(tmp_path)
    torch.testing.assert_close(data.train.x[0], torch.from_numpy(upright).permute(2, 0, 1) / 255)
    assert torch.equal(data.train.y[0], torch.from_numpy(numbers).long())
    draw_turned(tmp_path / "images" / "0.png", np.ascontiguousarray(upright[::-1, ::-1]), 3)
    with pytest.raises(ValueError, match=r"0\.png: its EXIF tag turns it \(orientation 3\).* mask 0\.png"):
        Data.from_folder(tmp_path)


def test_files_in_hidden_folders_are_no_rows(animals: tuple[Path, dict]) -> None:
    root, _ = animals
    draw(root / "cat" / ".thumbnails" / "0.png")
    data = Data.from_folder(root)
    assert len(data.train) + len(data.test) == 20


def test_images_of_several_pages_are_refused(animals: tuple[Path, dict]) -> None:
    root, _ = animals
    pages = [Image.fromarray(np.full((6, 5, 3), level, np.uint8)) for level in (0, 100, 200)]
    pages[0].save(root / "dog" / "stack.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match=r"stack\.tif holds 3 frames or pages; save the one that counts"):
        Data.from_folder(root)


def test_masks_of_class_numbers_are_no_jpegs(tmp_path: Path) -> None:
    for i in range(5):
        draw(tmp_path / "images" / f"{i}.png", (16, 16))
        mask(tmp_path / "masks" / f"{i}.jpg", RNG.integers(0, 2, (16, 16)).astype(np.uint8) * 255)
    with pytest.raises(
        ValueError, match=r"0\.jpg is a JPEG, whose compression changes class numbers; save the masks as"
    ):
        Data.from_folder(tmp_path)
    assert Data.from_folder(tmp_path, task="regression").task == "regression"
