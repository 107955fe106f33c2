from tests.tasks.events.conftest import dated, frame, hawkes

__all__ = ["dated", "frame", "hawkes"]
