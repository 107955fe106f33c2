"""Tables of pairs and image files that cannot be what was meant are refused in a sentence."""

import os

import pytest
from PIL import Image

from primal_attention.support.command import UserError
from primal_attention.tasks.lists.report import _picture
from primal_attention.tasks.pairs import ImageError, list_images, read_image
from primal_attention.tasks.pairs.pairs import read_pair_table


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "inside" / "pictures"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(folder / "a.png")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "secret.png")
    return folder


def write(folder, *images):
    path = folder.parent / "pairs.csv"
    path.write_text("image,caption\n" + "".join(f"{image},a square\n" for image in images))
    return path


@pytest.mark.parametrize("name", ["../../secret.png", "{root}/secret.png", "/etc/passwd"])
def test_images_outside_the_folders_are_refused(pictures, name):
    root = pictures.parents[1]
    table = write(pictures, "a.png", name.format(root=root))
    with pytest.raises(UserError, match=r"pairs\.csv, row 2: .* lies outside"):
        read_pair_table(table, images=[pictures])
    # a folder above allows them
    if "etc" not in name:
        read_pair_table(write(pictures, "secret.png"), images=[root])
        read_pair_table(write(pictures, root / "secret.png"), images=[root])


def test_images_beside_the_table_and_through_links_are_read(pictures):
    os.symlink(pictures.parents[1] / "secret.png", pictures / "link.png")
    table = write(pictures, "a.png", "link.png", "pictures/a.png", pictures / "a.png", "./a.png")
    found = read_pair_table(table, images=[pictures])
    assert all(path.is_file() for path in found.images)


def test_a_name_that_no_file_can_have_is_one_sentence(pictures):
    table = write(pictures, "x" * 5000 + ".png")
    assert len(read_pair_table(table, images=[pictures]).images) == 1
    with pytest.raises(ImageError, match="There is no file"):
        read_image(pictures / ("x" * 5000), (2, 2))


def test_links_and_pipes_are_named_for_what_they_are(pictures):
    os.symlink("loop.png", pictures / "loop.png")
    os.mkfifo(pictures / "pipe.png")
    (pictures / "sub").mkdir()
    os.symlink("..", pictures / "sub" / "up")
    with pytest.raises(ImageError, match="link that leads to no file"):
        read_image(pictures / "loop.png", (2, 2))
    with pytest.raises(ImageError, match="no ordinary file"):
        read_image(pictures / "pipe.png", (2, 2))
    assert [path.name for path in list_images(pictures)] == ["a.png"]


def test_pictures_of_a_report_have_the_same_limits(pictures, monkeypatch):
    template = str(pictures / "{id}.png")
    for item, content in enumerate((b"text", b"", b"%!PS-Adobe-3.0 EPSF-3.0\n")):
        (pictures / f"{item}.png").write_bytes(content)
        with pytest.raises(UserError, match=r"no image of a known format.*\{id\}"):
            _picture(template, item)
    (pictures / "9.png").write_bytes((pictures / "a.png").read_bytes())
    assert _picture(template, 9).shape == (96, 96, 3)
    monkeypatch.setattr("primal_attention.support.files.images._MAX_PIXELS", 60)
    with pytest.raises(UserError, match="pixels; reduce it first"):
        _picture(template, 9)
