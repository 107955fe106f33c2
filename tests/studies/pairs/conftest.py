from tests.tasks.pairs.conftest import write_emoji

__all__ = ["write_emoji"]
