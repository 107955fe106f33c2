"""Images of any mode and size, and files that are missing, broken or too large."""

import numpy as np
import pytest
from PIL import Image

from primal_attention.support.files import images as module
from primal_attention.tasks.pairs import ImageError, list_images, read_image, read_images

RED = (220, 40, 40)


def is_near(pixels, color, tolerance=3):
    return bool((abs(pixels.astype(int) - np.array(color)) <= tolerance).all())


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "YCbCr", "HSV"])
def test_colored_modes_keep_their_color(mode):
    image = Image.new("RGB", (9, 5), RED).convert(mode, palette=Image.Palette.ADAPTIVE)
    assert is_near(read_image(image, (4, 8)), RED, 6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16", "I", "F"])
def test_gray_modes_span_black_to_white(mode):
    white = {"I;16": 65535, "I": 65535, "F": 1.0}.get(mode, 255)
    kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}.get(mode)
    if kind is None:
        image = Image.fromarray(np.array([[0, 255]], np.uint8)).convert(mode)
    else:
        image = Image.fromarray(np.array([[0, white]], kind))
        assert image.mode == mode
    assert read_image(image, (1, 2))[0].tolist() == [[0] * 3, [255] * 3]


def test_transparent_parts_are_white_also_in_palettes(tmp_path):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (*RED, 255))
    for name in ("a.png", "b.gif", "c.webp"):
        image.save(tmp_path / name, **({"lossless": True} if name == "c.webp" else {}))
        left, right = read_image(tmp_path / name, (1, 2))[0]
        assert is_near(left, (255, 255, 255)), name
        assert is_near(right, RED), name
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert is_near(read_image(half, (1, 1)), (127, 127, 127))


def test_an_animation_is_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, (0, 0, 255))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert is_near(read_image(tmp_path / "a.gif", (4, 4)), RED)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    image = Image.fromarray(np.array([[[0] * 3, [255] * 3]], np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by half
    image.save(tmp_path / "a.png", exif=exif)
    assert read_image(tmp_path / "a.png", (1, 2))[0, :, 0].tolist() == [255, 0]


def test_arrays_are_read_by_their_kind():
    ramp = np.array([[0, 1]])
    for array in (
        (255 * ramp).astype(np.uint8),
        (65535 * ramp).astype(np.uint16),
        ramp.astype(bool),
        ramp.astype(np.float32),
        np.repeat(255 * ramp[:, :, None], 3, 2),
        np.repeat(ramp[:, :, None].astype(float), 1, 2),
    ):
        assert read_image(array, (1, 2))[0].tolist() == [[0] * 3, [255] * 3], array.dtype
    tiny, long = np.full((1, 1), 0.5), np.zeros((1, 3000), np.uint8)
    assert read_images([tiny, long], (8, 8)).pixels.shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 8, 8)), "Move the channels to the end"),
        (np.zeros((2, 8, 8, 3)), r"must have the shape"),
        (np.zeros((0, 8)), "no pixels"),
        (np.full((2, 2), np.nan), "not finite"),
        (np.full((2, 2), 200.0), "values from 0 to 1, got 200 to 200; scale them"),
        (np.full((2, 2), -1), "got -1 to -1"),
        (np.array([["a"]]), "must hold numbers"),
        (7, "got int"),
    ],
)
def test_an_array_that_is_no_image_is_refused(array, words):
    with pytest.raises(ImageError, match=words):
        read_image(array, (4, 4))


def test_broken_files_are_named_or_left_out(tmp_path):
    good = tmp_path / "good.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)).save(good)
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:900])
    (tmp_path / "words.png").write_text("this is no image")
    (tmp_path / "empty.png").touch()
    names = ["good.png", "cut.png", "words.png", "empty.png", "god.png", "."]
    files = [tmp_path / name for name in names]
    told = {
        1: "cut.png is broken",
        2: "words.png is no image of a known format",
        3: "empty.png is no image",
        4: "There is no file .*god.png. Did you mean 'good.png'",
        5: "is a folder",
    }
    for i, words in told.items():
        with pytest.raises(ImageError, match=words):
            read_images([files[i]], (8, 8))
    with pytest.raises(ImageError, match=r"images\[1\].*images\[2\].*images\[3\].* And 2 more\."):
        read_images(files, (8, 8))
    found = read_images(files, (8, 8), skip_broken=True)
    assert found.kept.tolist() == [0]
    assert len(found.problems) == 5
    with pytest.raises(ImageError):
        read_images(files[1:], (8, 8), skip_broken=True)
    with pytest.raises(ImageError, match="list of images"):
        read_images(str(good), (8, 8))


def test_bombs_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    Image.new("L", (300, 200)).save(tmp_path / "a.png")
    monkeypatch.setattr(module, "_MAX_PIXELS", 50_000)
    with pytest.raises(ImageError, match=r"a.png.* more than 50,000 pixels; reduce it"):
        read_image(tmp_path / "a.png", (4, 4))
    with pytest.raises(ImageError, match="more than 50,000"):
        read_image(np.zeros((300, 200), np.uint8), (4, 4))
    # limits of Pillow itself, which warns first
    for most in (40_000, 10_000):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(ImageError, match="more than 50,000 pixels"):
            read_image(tmp_path / "a.png", (4, 4))


def test_formats_that_start_other_programs_are_not_read(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(ImageError, match="known format"):
        read_image(tmp_path / "a.png", (4, 4))


def test_a_folder_is_listed_without_hidden_and_other_files(tmp_path):
    for name in ("b.PNG", "in/a.jpg", ".hidden/c.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [p.name for p in list_images(tmp_path)] == ["b.PNG", "a.jpg"]
    with pytest.raises(ImageError, match="Did you mean 'in'"):
        list_images(tmp_path / "inn")
    (tmp_path / "none").mkdir()
    with pytest.raises(ImageError, match=r"holds no files that end in \.png"):
        list_images(tmp_path / "none")
