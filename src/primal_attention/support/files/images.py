"""Images of any kind and size as arrays ``[n, height, width, 3]`` of bytes.

- Files, images of Pillow, and arrays ``[H W]``, ``[H W 1]``, ``[H W 3]`` or ``[H W 4]``.
- Transparent parts become white. Of an animation the first frame counts. 16 bits become 8.
- Images are stretched to one size: nothing is cut off, and tiny ones are enlarged.
- Images with too many pixels are refused before they are decoded.

Missing and broken files raise an :class:`ImageError` that names them, or are left out on request.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primal_attention.support.command import UserError, did_you_mean, needs
from primal_attention.support.files.folders import list_files

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "IMAGE_SUFFIXES",
    "ImageError",
    "ReadImages",
    "is_file",
    "list_images",
    "open_image",
    "read_image",
    "read_images",
]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".ico")
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "ICO")
"""Formats of Pillow that are read; others, such as EPS, start other programs."""
_MAX_PIXELS = 50_000_000
"""Pixels beyond which an image is refused: 50 MB of memory for each channel."""
_SHOWN = 3
"""Broken images that a message names."""

Picture: TypeAlias = "str | Path | Image.Image | NDArray[np.generic]"
"""What is read as an image."""


class ImageError(UserError):
    """An image that is missing, broken, too large, or of an unknown kind."""


class ReadImages(NamedTuple):
    """Images that were read."""

    pixels: NDArray[np.uint8]
    """Array ``[n, height, width, 3]``."""
    kept: NDArray[np.int64]
    """Places of these images among those that were asked for."""
    problems: tuple[str, ...] = ()
    """Why others were left out, one sentence each."""


def read_images(
    images: "Sequence[Picture]", size: tuple[int, int], *, skip_broken: bool = False
) -> ReadImages:
    """Return images as one array.

    Args:
        images: Paths, images of Pillow, or arrays; also one array ``[n H W]`` or ``[n H W C]``.
        size: Height and width of the result.
        skip_broken: Leave out images that cannot be read, instead of raising.

    Raises:
        ImageError: If an image cannot be read, or none is left.

    Example:
        >>> found = read_images([np.zeros((5, 9)), np.ones((2, 2, 3))], (4, 4))
        >>> found.pixels.shape, found.pixels.reshape(2, -1).max(1)
        ((2, 4, 4, 3), array([  0, 255], dtype=uint8))
    """
    if isinstance(images, str | Path):
        raise ImageError(
            f"images must be a list of images, got the path {str(images)!r}; give [path], or "
            "list_images(folder)."
        )
    rows, kept, problems = [], [], []
    for i, image in enumerate(images):
        try:
            rows.append(read_image(image, size))
            kept.append(i)
        except ImageError as error:
            problems.append(f"images[{i}]: {error}")
    if problems and (not skip_broken or not rows):
        more = len(problems) - _SHOWN
        words = " ".join(problems[:_SHOWN]) + (f" And {more} more." if more > 0 else "")
        raise ImageError(words if len(images) > 1 else problems[0].partition(": ")[2])
    if not rows:
        raise ImageError("There are no images.")
    return ReadImages(np.stack(rows), np.array(kept, dtype=np.int64), tuple(problems))


def read_image(image: "Picture", size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return one image as an array ``[height, width, 3]`` of bytes.

    Args:
        image: A path, an image of Pillow, or an array ``[H W]``, ``[H W 1]``, ``[H W 3]`` or
            ``[H W 4]``: bytes, 16-bit numbers, booleans, or floating point from 0 to 1.
        size: Height and width of the result.

    Raises:
        ImageError: If the image cannot be read; the message says why.

    Example:
        >>> read_image(np.array([[0, 65535]], dtype=np.uint16), (1, 2))[0, :, 0]
        array([  0, 255], dtype=uint8)
    """
    with needs("vision", "Reading images"):
        from PIL import Image

    if isinstance(image, str | Path):
        with open_image(Path(image)) as found:
            return _to_array(found, size)
    if isinstance(image, Image.Image):
        with _clear_errors("The image"):
            return _to_array(image, size)
    if hasattr(image, "__array__"):
        return _to_array(Image.fromarray(_check_array(np.asarray(image))), size)
    raise ImageError(
        f"An image must be a path, an image of Pillow or an array, got {type(image).__name__}."
    )


def list_images(folder: str | Path) -> list[Path]:
    """Return the image files of a folder and the folders inside, sorted by path.

    Hidden files and folders do not count.

    Args:
        folder: The folder.

    Raises:
        ImageError: If there is no such folder, no image in it, or too many.
    """
    try:
        return list_files(Path(folder), IMAGE_SUFFIXES)
    except UserError as error:
        raise ImageError(str(error)) from None


def is_file(path: Path) -> bool:
    """Return whether there is a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def _why_no_file(path: Path) -> str:
    try:
        if path.is_dir():
            return f"{path} is a folder, not an image."
        if path.is_symlink():
            return f"{path} is a link that leads to no file."
        if path.exists():
            return f"{path} is no ordinary file."
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"There is no file {path}.{did_you_mean(path.name, beside)}"
    except OSError as error:
        return f"There is no file {str(path)[:200]}… ({error.strerror})."


@contextmanager
def open_image(file: Path | BinaryIO, where: str = "") -> "Iterator[Image.Image]":
    """Open an image with Pillow; what goes wrong inside becomes an :class:`ImageError`.

    Args:
        file: A path, or an open file.
        where: What messages call it; by default the path.
    """
    with needs("vision", "Reading images"):
        from PIL import Image

    if isinstance(file, Path) and not is_file(file):
        raise ImageError(_why_no_file(file))
    with _clear_errors(where or str(file)), Image.open(file, formats=_FORMATS) as image:
        width, height = image.size
        if width * height > _MAX_PIXELS:
            raise ImageError(f"it {_too_large()}")
        yield image


@contextmanager
def _clear_errors(what: str) -> Iterator[None]:
    """Turn the many errors of Pillow into one kind, and its warning of bombs into an error."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except ImageError as error:
        words = str(error)
        raise ImageError(words if words.startswith(what) else f"{what}: {words}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{what} {_too_large()}") from error
    except UnidentifiedImageError as error:
        kinds = ", ".join(_FORMATS)
        raise ImageError(f"{what} is no image of a known format ({kinds}).") from error
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, IndexError) as error:
        raise ImageError(f"{what} is broken: {' '.join(str(error).split())}.") from error


def _too_large() -> str:
    return f"has more than {_MAX_PIXELS:,} pixels; reduce it first."


def _to_array(image: "Image.Image", size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return an image of Pillow as bytes of one size."""
    from PIL import Image, ImageOps

    width, height = image.size
    if not width or not height:
        raise ImageError(f"it has no pixels: {width} x {height}.")
    if width * height > _MAX_PIXELS:
        raise ImageError(f"it {_too_large()}")
    if image.format == "JPEG":
        # the decoder itself reduces large photographs
        image.draft("RGB", (4 * size[1], 4 * size[0]))
    image = ImageOps.exif_transpose(image)
    flat = _flatten(image)
    if flat.size != (size[1], size[0]):
        flat = flat.resize((size[1], size[0]), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return np.asarray(flat, dtype=np.uint8)


def _flatten(image: "Image.Image") -> "Image.Image":
    """Return an image of any mode as RGB, on white."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_to_bytes(np.asarray(image), "the image"))
    has_alpha = image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    if not has_alpha:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _check_array(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return an array as bytes ``[H W]``, ``[H W 3]`` or ``[H W 4]``."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        hint = " Move the channels to the end." if array.ndim == 3 else ""
        raise ImageError(
            f"An array must have the shape [H W], [H W 1], [H W 3] or [H W 4], got "
            f"{array.shape}.{hint}"
        )
    if not array.size:
        raise ImageError(f"The array has no pixels: shape {array.shape}.")
    if array.shape[0] * array.shape[1] > _MAX_PIXELS:
        raise ImageError(f"The array {_too_large()}")
    return _to_bytes(array, "The array")


def _to_bytes(array: NDArray[np.generic], what: str) -> NDArray[np.uint8]:
    """Return numbers as bytes, by the range of their kind."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
        raise ImageError(f"{what} must hold numbers, got {array.dtype}.")
    if not np.isfinite(array).all():
        raise ImageError(f"{what} holds a value that is not finite.")
    low, high = float(array.min()), float(array.max())
    is_float = np.issubdtype(array.dtype, np.floating)
    # 16 bits by their type; wider integers by what they hold
    is_deep = not is_float and (array.dtype == np.uint16 or high > 255)
    top = 1.0 if is_float and high <= 1 else (65535.0 if is_deep else 255.0)
    if low < 0 or high > top or (is_float and high > 1 and what != "the image"):
        allowed = "0 to 1" if is_float else f"0 to {top:.0f}"
        raise ImageError(
            f"{what} must hold values from {allowed}, got {low:g} to {high:g}; scale them."
        )
    return np.rint(array.astype(np.float64) * (255.0 / top)).astype(np.uint8)
