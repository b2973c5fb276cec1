"""Folders of images: one for each class, or images beside masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.data.images import GREY, open_image, to_numbers, to_tensor

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"))
IMAGES, MASKS = ("images", "image", "imgs", "img"), ("masks", "mask", "labels", "annotations", "annot", "gt", "depth")
TRAIN, TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
ENDINGS = tuple(f"_{name}" for name in ("mask", "label", "labels", "gt", "depth"))


@dataclass(frozen=True)
class ImageFiles:
    """Images of a folder, each with the number of its class or with its mask: a map-style Dataset of pairs.

    Args:
        images: files.
        targets: class number of each, or the file of its mask.
        classes: names of the folders, in the order of their numbers; None for masks.
        left_out: how many files of the folder are no images.
        size: (height, width) that images and masks are brought to; None: they must have one size.
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

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        file, target = self.images[i], self.targets[i]
        try:
            image = open_image(file)
            x = to_tensor(image, self.size, self.grey)
            if self.classes is not None:
                return x, target
            mask = open_image(target)
            if mask.size != image.size:
                raise ValueError(f"it has {_shape(image)} pixels, and its mask {target.name} {_shape(mask)}")
            return x, to_numbers(mask, self.size)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def find_files(
    folder: Path, masks: str | Path | None = None, classes: Sequence[str] | None = None
) -> tuple[ImageFiles, ImageFiles | None, str]:
    """The images of a folder, those of its test part if it has one, and what was found, in words.

    Args:
        folder: see `Data.from_folder`.
        masks: the folder of the masks, if it has none of the usual names.
        classes: names of the folders of the classes, in the order that their numbers shall have.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: images and masks do not belong together.
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
    others = [name for name in TEST if (folder / name).is_dir() and folder / name != parts[TEST][0]]
    unused = f"; {', '.join(others)} is left out: Data.from_folder({str(folder / others[0])!r})" if others else ""
    return (
        train,
        test,
        f"training rows are those of {parts[TRAIN][0].name}, test rows those of {parts[TEST][0].name}{unused}",
    )


def _files_of(folder: Path, masks: Any, classes: Sequence[str] | None) -> ImageFiles:
    """The images of one part: beside masks, in two folders or in one, or in a folder for each class."""
    images = _named(folder, IMAGES)
    mask_folder = masks if isinstance(masks, Path) else Path(folder, masks) if masks else _named(folder, MASKS)
    if mask_folder is not None and not mask_folder.is_dir():
        raise FileNotFoundError(f"there is no folder {mask_folder} of masks")
    if mask_folder is not None and (images is not None or masks):
        here, others = _images_in(images or folder)
        by_stem = {file.stem: file for file in _images_in(mask_folder)[0]}
        pairs = {file: _mask_of(file, by_stem) for file in here}
        used = {mask for mask in pairs.values() if mask is not None}
        if lonely := [str(mask) for mask in by_stem.values() if mask not in used]:
            raise ValueError(f"{len(lonely)} masks belong to no image, such as {lonely[0]}: names must be alike")
    else:
        here, others = _images_in(folder)
        marked = {file.stem: file for file in here if file.stem.endswith(ENDINGS)}
        pairs = {file: _mask_of(file, marked) for file in here if file.stem not in marked}
        if not marked:
            return _files_of_classes(folder, here, classes)
    if not pairs:
        raise FileNotFoundError(f"{images or folder} holds no image")
    if missing := [str(file) for file, mask in pairs.items() if mask is None]:
        raise ValueError(f"{len(missing)} of {len(pairs)} images have no mask, such as {missing[0]}")
    return ImageFiles(tuple(pairs), tuple(pairs.values()), None, others)


def _files_of_classes(folder: Path, loose: list[Path], classes: Sequence[str] | None) -> ImageFiles:
    folders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders or loose:
        what = f"{len(loose)} images" if loose else "neither images nor folders"
        raise FileNotFoundError(
            f"{folder} holds {what}; wanted is a folder for each class (cat/1.png, dog/2.png), images beside masks (images/1.png, masks/1.png "
            "or 1.png, 1_mask.png), or either of them in train and test"
        )
    names = tuple(entry.name for entry in folders)
    known = names if classes is None else tuple(map(str, classes))
    if unknown := set(names) - set(known):
        raise ValueError(f"{folder}: the folders {', '.join(sorted(unknown))} are none of classes={list(known)}")
    files, numbers, others = [], [], 0
    for entry in folders:
        images, left_out = _images_in(entry, deep=True)
        if not images:
            raise FileNotFoundError(f"{entry} holds no image, and is to be a class; leave it out, or give it some")
        files += images
        numbers += [known.index(entry.name)] * len(images)
        others += left_out
    return ImageFiles(tuple(files), tuple(numbers), known, others)


def _images_in(folder: Path, deep: bool = False) -> tuple[list[Path], int]:
    """The images of a folder in order of their names, and how many other files there are."""
    entries = sorted(folder.rglob("*") if deep else folder.iterdir())
    files = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    images = [file for file in files if file.suffix.lower() in SUFFIXES]
    return images, len(files) - len(images)


def _mask_of(image: Path, masks: dict[str, Path]) -> Path | None:
    names = (image.stem, *(image.stem + ending for ending in ENDINGS))
    return next((masks[name] for name in names if name in masks), None)


def _named(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def is_grey(file: Path) -> bool:
    """Whether an image has one channel of grey levels."""
    return open_image(file).mode in GREY


def _shape(image: Any) -> str:
    return f"{image.size[1]} x {image.size[0]}"
