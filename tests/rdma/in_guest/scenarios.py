"""What is tried in the guest that is alone, one after the other; or one rank's half of what two guests do.

Writes a line of JSON for each scenario: its name and its report.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
KEY_FILE = Path("/tmp/cluster-key")
HOSTS = {"prefill": "10.77.0.1", "decode": "10.77.0.2"}
RANK_TIMEOUT_S = 240


class Scenario(NamedTuple):
    name: str
    roles: tuple[str, ...] = ("open",)
    protocol: str = "rdma"
    device: str = "rxe0"
    without: tuple[str, ...] = ()


HAND_OFF = ("prefill", "decode")
SCENARIOS = [
    Scenario("rdma", HAND_OFF),
    Scenario("misnamed", device="rxe9"),
    Scenario("one of two misnamed", device="rxe0,rxe9"),
    Scenario("two devices", device="rxe0,rxe1"),
    Scenario("down", device="rxe2"),
    Scenario("one of two down", device="rxe0,rxe2"),
    Scenario("tcp", protocol="tcp", device=""),
    Scenario("misnamed, not forced", device="rxe9", without=("forced_hca",)),
    Scenario("misnamed, not forced, not looked at", HAND_OFF, device="rxe9", without=("forced_hca", "look")),
]


def main() -> None:
    KEY_FILE.write_text("a key for the guests alone")
    which = sys.argv[1]
    scenarios = SCENARIOS if which == "alone" else [Scenario(which, (which,))]
    for scenario in scenarios:
        report = run(scenario, HOSTS.get(which, HOSTS["prefill"]))
        print(json.dumps({"scenario": scenario.name} | report), flush=True)


def run(scenario: Scenario, host: str) -> dict[str, Any]:
    """What each rank said (None: it died), and what the kernel counted meanwhile."""
    before = counters()
    ranks = {role: start(role, scenario, host) for role in scenario.roles}
    said = {role: rank.communicate()[0] for role, rank in ranks.items()}
    counted = {name: value - before[name] for name, value in counters().items()}
    return {role: json.loads(line) if line else None for role, line in said.items()} | {"counted": counted}


def start(role: str, scenario: Scenario, host: str) -> subprocess.Popen[str]:
    settings = scenario._asdict() | {"host": host}
    command = ["timeout", str(RANK_TIMEOUT_S), sys.executable, str(FOLDER / "rank.py"), role, json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def counters() -> dict[str, int]:
    """packets: sent by the RDMA device. again: those that it had to send or take again. local_bytes: over TCP, when
    both ranks are on this host. dropped: packets that the wire lost."""
    device = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
    again = ("completer_retry_err", "duplicate_request", "out_of_seq_request", "rcvd_seq_err")
    queues = subprocess.run(["tc", "-j", "-s", "qdisc", "show"], capture_output=True, check=True, timeout=30)
    return {
        "packets": int((device / "sent_pkts").read_text()),
        "again": sum(int((device / name).read_text()) for name in again),
        "local_bytes": int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text()),
        "dropped": sum(queue["drops"] for queue in json.loads(queues.stdout) if queue["kind"] == "netem"),
    }


if __name__ == "__main__":
    main()
