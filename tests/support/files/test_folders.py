import pytest

from primal_attention.support.command import UserError
from primal_attention.support.files import folders
from primal_attention.support.files.folders import folder_classes, list_files


@pytest.fixture
def root(tmp_path):
    for name in ("b/2.TXT", "a/in/1.txt", ".hidden/3.txt", "a/.4.txt", "a/5.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_files_have_the_class_of_their_folder_and_hidden_ones_do_not_count(root):
    files = list_files(root, (".txt",))
    assert [f.relative_to(root).as_posix() for f in files] == ["a/in/1.txt", "b/2.TXT"]
    assert folder_classes(root, files) == ["a", "b"]
    (root / "6.txt").touch()
    with pytest.raises(UserError, match="files without a class"):
        folder_classes(root, list_files(root, (".txt",)))


def test_folders_that_cannot_be_read_are_refused(root, monkeypatch):
    with pytest.raises(UserError, match=r"there is no folder .*\. Did you mean 'a'"):
        list_files(root / "aa", (".txt",))
    with pytest.raises(UserError, match=r"holds no files that end in \.png, \.jpg"):
        list_files(root, (".png", ".jpg"))
    monkeypatch.setattr(folders, "MAX_FILES", 1)
    with pytest.raises(UserError, match="more than 1 files"):
        list_files(root, (".txt",))
