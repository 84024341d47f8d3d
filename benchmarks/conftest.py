from __future__ import annotations

from tests.conftest import tiny as tiny
