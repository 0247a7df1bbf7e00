"""A node takes another role: it drains, leaves its routers, and starts again as the other one, in the same process.

Everything that it was started with holds for the new role too: every role takes the same options, and ignores what it
does not need. A prefill node needs a free bootstrap port, so that is looked at before anything is given up.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from common.config import NodeConfig, Role, check_node_config
from common.errors import ConfigError, RequestError, ServingError
from common.refusals import check_known, refuse
from node.registration import check_registration

_ROLES = (Role.PREFILL, Role.DECODE)


def read_role(raw: dict[str, Any]) -> Role:
    """Of the body of POST /role. Raises RequestError."""
    check_known("", raw, frozenset({"role"}))
    role = raw.get("role")
    if role not in [each.value for each in _ROLES]:
        refuse("role", role, "prefill or decode")
    return Role(str(role))


def check_role(config: NodeConfig, role: Role) -> NodeConfig:
    """The settings as those of another role. Raises RequestError (409) when they do not work there."""
    changed = msgspec.structs.replace(config, role=role)
    try:
        check_node_config(changed)
        check_registration(role, config.server)
    except ServingError as error:
        raise cannot_change(error) from error
    return changed


def cannot_change(error: ServingError) -> RequestError:
    return RequestError(f"role: {error.message}", code="role_refused", param=error.param, status=409)


def command_as(role: Role, own: Role, command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The command line of this process with another role in it. command: all of it; arguments: those of the program,
    the first of which is the role. Raises ConfigError when it was not started by the command line."""
    place = len(command) - len(arguments)
    if not arguments or place < 1 or command[place] != own.value:
        raise ConfigError(f"the node was not started as `tandem {own.value}`", param="role")
    return [*command[:place], role.value, *command[place + 1 :]]


def own_command_as(role: Role, own: Role) -> list[str]:
    """Raises ConfigError."""
    return command_as(role, own, sys.orig_argv, sys.argv[1:])


def start_again(command: Sequence[str]) -> NoReturn:
    """In place of this process, which keeps its id and its output. Nothing of it may be open any more."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, list(command))
