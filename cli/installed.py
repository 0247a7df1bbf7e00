"""What is installed: a router's image has no more than a router needs."""

from __future__ import annotations

import importlib.util

from common.errors import ConfigError

NODE_INSTALL = "use the node's image, or install the extra cpu, cuda12 or cuda13 (pip install -e '.[cpu]')"


def is_installed(module: str) -> bool:
    """Whether there is such a package; "numpy.linalg" asks for numpy."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def require_nodes(command: str) -> None:
    """Raises ConfigError where no node can run."""
    for name in ("torch", "zmq"):
        if not is_installed(name):
            raise ConfigError(f"tandem {command}: {name} is not installed here: {NODE_INSTALL}")
