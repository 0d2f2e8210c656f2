from __future__ import annotations

from tests.trainer.resume.conftest import nursery

__all__ = ["nursery"]
