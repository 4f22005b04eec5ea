"""The log in a file: the contract, and what a file, several processes, kills and forks ask besides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from log_contract import Keys, Ledger, LogContract

from amends.store.sqlite import SqliteLog


class TestSqliteLog(LogContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[SqliteLog]:
        log = SqliteLog(tmp_path / "amends.db", Ledger(), Keys())
        yield log
        log.close()
