"""Folders of images: one folder per class, or images with masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.data.images import GREY, mode_of, open_image, to_numbers, to_tensor

LOSSY = frozenset((".jpg", ".jpeg", ".jfif", ".jpe"))  # whose compression changes the numbers of a mask
SUFFIXES = LOSSY | {".png", ".bmp", ".webp", ".avif", ".tif", ".tiff", ".ppm", ".pgm", ".gif"}
IMAGES, MASKS = ("images", "image", "imgs", "img"), ("masks", "mask", "labels", "annotations", "annot", "gt", "depth")
TRAIN, TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
ENDINGS = tuple(f"_{name}" for name in ("mask", "label", "labels", "gt", "depth"))


@dataclass(frozen=True)
class ImageFiles:
    """Map-style Dataset of the images of a folder, each with its class number or its mask.

    Args:
        images: image files.
        targets: class number or mask file of each image.
        classes: names of the class folders, in the order of their numbers; None for masks.
        left_out: number of files in the folder that are not images.
        size: (height, width) to resize images and masks to; None: all must have the same size.
        grey: whether images have one channel.
    """

    images: tuple[Path, ...]
    targets: tuple[Any, ...]
    classes: tuple[str, ...] | None
    left_out: int = 0
    size: tuple[int, int] | None = None
    grey: bool = False

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def _first(self) -> tuple[int, int]:
        """Width and height of the first image."""
        width, height = open_image(self.images[0]).size
        return width, height

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        file, target = self.images[i], self.targets[i]
        image = open_image(file)
        if self.size is None and image.size != self._first:
            width, height = self._first
            raise ValueError(
                f"{file} has {_shape(image)} pixels, and {self.images[0]} {height} x {width}: give size=(height, width) to resize all"
            )
        mask = None if self.classes is not None else open_image(target)
        try:
            x = to_tensor(image, self.size, self.grey)
            if mask is None:
                return x, target
            if mask.size != image.size:
                raise ValueError(f"it has {_shape(image)} pixels, and its mask {target.name} {_shape(mask)}")
            _check_orientation(image, mask, target)
            return x, to_numbers(mask, self.size)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def _check_orientation(image: Any, mask: Any, target: Path) -> None:
    """Raise ValueError if the EXIF tags leave open which way up the mask of an image is: sizes tell it only for quarter turns."""
    turn, turn_of_mask = image.info["orientation"], mask.info["orientation"]
    sizes_tell = (turn > 4) != (turn_of_mask > 4) and image.width != image.height
    if turn != turn_of_mask and not sizes_tell:
        raise ValueError(
            f"its EXIF tag turns it (orientation {turn}), and that of its mask {target.name} differs ({turn_of_mask}); "
            "save both upright, by PIL.ImageOps.exif_transpose"
        )


def find_files(
    folder: Path, masks: str | Path | None = None, classes: Sequence[str] | None = None
) -> tuple[ImageFiles, ImageFiles | None, str]:
    """Return the images of a folder, those of its test part or None, and a note that describes them.

    Args:
        folder: see `Data.from_folder`.
        masks: folder of the masks, if it has none of the usual names.
        classes: names of the class folders, in the order of their numbers.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: images and masks do not match.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    images = _named(folder, IMAGES)
    parts: dict[Any, tuple[Any, Any]] = {}
    mask_root = Path(folder, masks) if masks is not None else _named(folder, MASKS)
    for names in (TRAIN, TEST):
        if images is not None and mask_root is not None and _named(images, names) is not None:
            parts[names] = (_named(images, names), _named(mask_root, names))
        elif (part := _named(folder, names)) is not None:
            parts[names] = (part, None)
    if TRAIN not in parts or TEST not in parts:
        files = _files_of(folder, masks, classes)
        return files, None, f"{len(files):,} images of {folder.name}"
    train, test = (_files_of(part, mask_part or masks, classes) for part, mask_part in (parts[TRAIN], parts[TEST]))
    if classes is None and train.classes != test.classes:
        raise ValueError(
            f"{folder}: the training part has the folders {train.classes}, and the test part {test.classes}"
        )
    other_parts = [name for name in TEST if (folder / name).is_dir() and folder / name != parts[TEST][0]]
    unused = (
        f"; {', '.join(other_parts)} is left out: Data.from_folder({str(folder / other_parts[0])!r})"
        if other_parts
        else ""
    )
    return (
        train,
        test,
        f"training rows are those of {parts[TRAIN][0].name}, test rows those of {parts[TEST][0].name}{unused}",
    )


def _files_of(folder: Path, masks: Any, classes: Sequence[str] | None) -> ImageFiles:
    """Return the images of one part: with masks in the same or another folder, or in one folder per class."""
    images = _named(folder, IMAGES)
    mask_folder = masks if isinstance(masks, Path) else Path(folder, masks) if masks else _named(folder, MASKS)
    if mask_folder is not None and not mask_folder.is_dir():
        raise FileNotFoundError(f"there is no folder {mask_folder} of masks")
    if mask_folder is not None and (images is not None or masks):
        images_here, n_others = _images_in(images or folder)
        by_stem = {file.stem: file for file in _images_in(mask_folder)[0]}
        pairs = {file: _mask_of(file, by_stem) for file in images_here}
        used = {mask for mask in pairs.values() if mask is not None}
        if unmatched := [str(mask) for mask in by_stem.values() if mask not in used]:
            raise ValueError(f"{len(unmatched)} masks belong to no image, such as {unmatched[0]}: names must match")
    else:
        images_here, n_others = _images_in(folder)
        marked = {file.stem: file for file in images_here if file.stem.endswith(ENDINGS)}
        pairs = {file: _mask_of(file, marked) for file in images_here if file.stem not in marked}
        if not marked:
            return _files_of_classes(folder, images_here, classes)
    if not pairs:
        raise FileNotFoundError(f"{images or folder} holds no image")
    if missing := [str(file) for file, mask in pairs.items() if mask is None]:
        raise ValueError(f"{len(missing)} of {len(pairs)} images have no mask, such as {missing[0]}")
    return ImageFiles(tuple(pairs), tuple(pairs.values()), None, n_others)


def _files_of_classes(folder: Path, loose: list[Path], classes: Sequence[str] | None) -> ImageFiles:
    folders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders or loose:
        contents = f"{len(loose)} images" if loose else "neither images nor folders"
        raise FileNotFoundError(
            f"{folder} holds {contents}; expected a folder for each class (cat/1.png, dog/2.png), images with masks (images/1.png, masks/1.png "
            "or 1.png, 1_mask.png), or either of them in train and test"
        )
    names = tuple(entry.name for entry in folders)
    class_names = names if classes is None else tuple(map(str, classes))
    if unknown := set(names) - set(class_names):
        raise ValueError(f"{folder}: the folders {', '.join(sorted(unknown))} are none of classes={list(class_names)}")
    files, numbers, n_others = [], [], 0
    for entry in folders:
        images, left_out = _images_in(entry, deep=True)
        if not images:
            raise FileNotFoundError(
                f"{entry} should be the folder of a class, and holds no image; remove it, or add images"
            )
        files += images
        numbers += [class_names.index(entry.name)] * len(images)
        n_others += left_out
    return ImageFiles(tuple(files), tuple(numbers), class_names, n_others)


def _images_in(folder: Path, deep: bool = False) -> tuple[list[Path], int]:
    """Return the images of a folder, sorted by name, and the number of other files."""
    entries = sorted(folder.rglob("*") if deep else folder.iterdir())
    hidden = (any(part.startswith(".") for part in entry.relative_to(folder).parts) for entry in entries)
    files = [entry for entry, is_hidden in zip(entries, hidden, strict=True) if entry.is_file() and not is_hidden]
    images = [file for file in files if file.suffix.lower() in SUFFIXES]
    return images, len(files) - len(images)


def _mask_of(image: Path, masks: dict[str, Path]) -> Path | None:
    names = (image.stem, *(image.stem + ending for ending in ENDINGS))
    return next((masks[name] for name in names if name in masks), None)


def _named(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def check_lossless(train: ImageFiles, test: ImageFiles | None, task: str) -> None:
    """Raise ValueError if masks of class numbers are JPEGs, whose compression makes other numbers of them at the edges."""
    targets = [*train.targets, *(test.targets if test is not None else ())]
    lossy = next((file for file in targets if file.suffix.lower() in LOSSY), None)
    if task != "regression" and lossy is not None:
        raise ValueError(
            f"{lossy} is a JPEG, whose compression changes class numbers; save the masks as PNG, of two classes say by "
            "PIL.Image.open(file).convert('L').point(lambda v: v > 127)"
        )


def is_grey(file: Path) -> bool:
    """Return whether an image has a single channel of grey levels."""
    return mode_of(file) in GREY


def _shape(image: Any) -> str:
    return f"{image.size[1]} x {image.size[0]}"
