"""Images as arrays; :mod:`primal_attention.files.images` reads them."""

from primal_attention.files.images import (
    IMAGE_SUFFIXES,
    ImageError,
    ReadImages,
    list_images,
    read_image,
    read_images,
)

__all__ = ["IMAGE_SUFFIXES", "ImageError", "ReadImages", "list_images", "read_image", "read_images"]
