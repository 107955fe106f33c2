from tests.tasks.longrange.conftest import real_data

__all__ = ["real_data"]
