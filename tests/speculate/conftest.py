"""The small model of the ladder's tests, to draft and to be drafted for."""

from __future__ import annotations

from tests.ladder.conftest import tiny_model as tiny_model
