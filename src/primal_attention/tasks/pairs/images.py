"""Images as arrays; :mod:`primal_attention.support.files.images` reads them."""

from primal_attention.support.files.images import (
    IMAGE_SUFFIXES,
    ImageError,
    ReadImages,
    list_images,
    read_image,
    read_images,
)

__all__ = ["IMAGE_SUFFIXES", "ImageError", "ReadImages", "list_images", "read_image", "read_images"]
