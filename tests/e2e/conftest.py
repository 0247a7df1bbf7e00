"""What the tests of this folder share and leave as they found it: a stack of real processes, folders of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.models import Models
from tests.support.stack import Stack, stack


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack"), with_unified=True) as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
