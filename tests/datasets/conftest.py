from tests.tasks.longrange.conftest import real_data
from tests.tasks.pairs.conftest import write_emoji

__all__ = ["real_data", "write_emoji"]
