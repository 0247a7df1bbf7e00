"""The README's curl commands, as they stand there but for the port."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests.support.stack import REPO, Stack


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_readmes_curl_commands_answer_the_question(shared_stack: Stack) -> None:
    text = (REPO / "README.md").read_text()
    commands = re.findall(r"^    (curl -s localhost:30000/\S+ .*?\}')$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        asked = command.replace("localhost:30000", shared_stack.router.url.removeprefix("http://"))
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
        assert "768-192 = <<768-192=576>>576 boys." in json.dumps(json.loads(done.stdout)), done.stdout
