"""`tandem up` with fake nodes behind the real router: `python fake_up.py PORT [flags of both nodes]`"""

from __future__ import annotations

import sys
from pathlib import Path

from cli.children import ChildPlan, Children
from cli.up import Options, plan_children, run, say

FAKE_NODE = str(Path(__file__).with_name("fake_node.py"))


def fake_plan(options: Options) -> list[ChildPlan]:
    *nodes, router = plan_children(options)
    fakes = [
        ChildPlan(node.name, (sys.executable, FAKE_NODE, node.url.rpartition(":")[2], *sys.argv[2:]), node.url)
        for node in nodes
    ]
    return [*fakes, router]


if __name__ == "__main__":
    once = "--once" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--once"]
    port = int(sys.argv[1])
    chosen = Options(
        host="127.0.0.1",
        port=port,
        model_path="none",
        device="cpu",
        transport="loopback",
        threads=None,
        start_timeout=3.0 if "--mute" in sys.argv else 30.0,
        log_level="warning",
        once=once,
    )
    sys.exit(run(chosen, fake_plan(chosen), Children(say, grace_s=1.5)))
