from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.files import made_secrets


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys under their names in containers."""
    return made_secrets(tmp_path_factory.mktemp("keys"))
