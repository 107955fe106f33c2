"""Long sequences: the tasks of Long Range Arena, their data, models and schedules."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
