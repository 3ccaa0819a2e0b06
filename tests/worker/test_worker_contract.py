"""The worker holds the executors' contract, with agents that are executed and with agents that are forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker.executor_contract import ExecutedAgentContract, ExecutorContract


class TestWorker(ExecutorContract):
    def path_is_gone(self, path: str) -> bool:
        return not Path(path).exists()


class TestWorkerWithPreload(ExecutorContract):
    @pytest.fixture
    def preload(self) -> list[str]:
        return ["decimal"]

    def path_is_gone(self, path: str) -> bool:
        return not Path(path).exists()


class TestWorkerWithCommands(ExecutedAgentContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        (tmp_path / "folder").mkdir()
        return str(tmp_path / "folder")
