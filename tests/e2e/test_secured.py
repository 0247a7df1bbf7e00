"""A stack with everything shut: TLS, keys and a cluster key on every process, the administration at its own port.

What may be asked is asked, what may not is refused, processes are killed in the middle; nothing of it leaves a key or a
prompt in any log.
"""

from __future__ import annotations

import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme

from tests.support.stack import START_TIMEOUT_S, Server, free_port, node, running

USER, ADMIN, NODES, CLUSTER, WRONG = (
    f"{name}-s3cr3t-0123456789abcdef" for name in ("user", "admin", "nodes", "cluster", "wrong")
)
PROMPT = "zebra-prompt-71f3"
ANSWER = "zebra-stop-71f3"
LONG: dict[str, Any] = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """client: asks the router's public port; admin: its other one. Neither has a key by itself. shows: as trust, with a
    certificate, which the nodes ask for."""

    folder: Path
    trust: ssl.SSLContext
    shows: ssl.SSLContext
    router: Server
    prefill: Server
    decode: Server
    client: httpx.Client
    admin: httpx.Client

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def secret_file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def certificate(folder: Path) -> tuple[str, list[str]]:
    """The authority's file, and a server's options."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    leaf.private_key_pem.write_to_path(folder / "key.pem")
    for i, blob in enumerate(leaf.cert_chain_pems):
        blob.write_to_path(folder / "cert.pem", append=i > 0)
    options = ["--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem")]
    return str(folder / "ca.pem"), options


@pytest.fixture(scope="module", params=["debug", pytest.param("info", marks=pytest.mark.slow)])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    ca_file, tls = certificate(folder)
    node_keys = secret_file(folder, "nodes", f"admin router {NODES}\n")
    shut = [*tls, "--log-level", request.param]
    nodes = [*shut, "--api-key-file", node_keys, "--ssl-ca-certs", ca_file]
    nodes += ["--cluster-key-file", secret_file(folder, "cluster", CLUSTER), "--transport", "loopback"]
    port, admin_port, bootstrap_port = free_port(), free_port(), free_port()
    with ExitStack() as exits:
        prefill = exits.enter_context(node("prefill", folder, nodes, bootstrap_port=bootstrap_port))
        decode = exits.enter_context(node("decode", folder, nodes))
        options = ["router", "--port", str(port), "--admin-port", str(admin_port), *shut]
        options += ["--prefill", https(prefill), str(bootstrap_port), "--decode", https(decode)]
        options += ["--api-key-file", secret_file(folder, "keys", f"user ann {USER}\nadmin root {ADMIN}\n")]
        options += ["--worker-api-key-file", node_keys, "--worker-ca-file", ca_file]
        router = exits.enter_context(running("router", options, f"https://127.0.0.1:{port}", folder))
        trust, shows = ssl.create_default_context(cafile=ca_file), ssl.create_default_context(cafile=ca_file)
        shows.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        client = exits.enter_context(httpx.Client(base_url=router.url, verify=trust, timeout=60))
        admin = exits.enter_context(httpx.Client(base_url=f"https://127.0.0.1:{admin_port}", verify=trust, timeout=60))
        wait_healthy(router, client)
        yield Secured(
            folder=folder,
            trust=trust,
            shows=shows,
            router=router,
            prefill=prefill,
            decode=decode,
            client=client,
            admin=admin,
        )


def https(server: Server) -> str:
    return server.url.replace("http://", "https://")


def wait_healthy(server: Server, client: httpx.Client) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.text()
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(server.text())


def ask(secured: Secured, **fields: Any) -> httpx.Response:
    body = {"text": f"Question: {PROMPT}", "sampling_params": {"max_new_tokens": 8, "stop": ANSWER}} | fields
    return secured.client.post("/generate", json=body, headers=bearer(USER))


def test_with_the_right_keys_it_serves(secured: Secured) -> None:
    answer = ask(secured)
    assert answer.status_code == 200
    assert sum(answer.json()["meta_info"]["transfer_bytes"].values()) > 0  # handed over, not made by decode alone
    events = ask(secured, stream=True).text.split("\n\n")
    assert len(events) > 3 and events[-2] == "data: [DONE]"


def test_openais_client_meets_its_own_errors(secured: Secured) -> None:
    def models(key: str) -> list[Any]:
        with openai.OpenAI(
            base_url=f"{secured.router.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=httpx.Client(verify=secured.trust, timeout=30),
        ) as client:
            return list(client.models.list())

    assert len(models(USER)) == 1
    with pytest.raises(openai.AuthenticationError) as refused:
        models(WRONG)
    assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
    assert WRONG not in str(refused.value)


def test_without_tls_nobody_answers(secured: Secured) -> None:
    for server in (secured.router, secured.prefill, secured.decode):
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https://", "http://") + "/health", timeout=10)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secured.router.url}/health", timeout=10)


def test_the_administration_has_its_own_port(secured: Secured) -> None:
    for path in ("/server_info", "/flush_cache", "/workers"):
        for key in (USER, ADMIN):
            answer = secured.client.get(path, headers=bearer(key))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert secured.admin.get(path).status_code == 401
        assert secured.admin.get(path, headers=bearer(WRONG)).status_code == 401
        assert secured.admin.get(path, headers=bearer(USER)).status_code == 403
    assert secured.admin.get("/flush_cache", headers=bearer(ADMIN)).status_code == 200
    info = secured.admin.get("/server_info", headers=bearer(ADMIN))
    assert info.status_code == 200 and len(info.json()["prefill"]) == 1
    assert not any(secret in info.text for secret in (USER, ADMIN, NODES, CLUSTER, PROMPT))
    answer = secured.client.post("/abort_request", json={"abort_all": True}, headers=bearer(ADMIN))
    assert answer.status_code == 403


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_nodes_let_in_who_has_their_key(secured: Secured, which: str) -> None:
    url = https(getattr(secured, which))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", verify=secured.trust, timeout=30)
    with httpx.Client(base_url=url, verify=secured.shows, timeout=30) as client:
        assert client.get("/health").status_code == 200
        for path in ("/server_info", "/metrics", "/debug/state", "/flush_cache", "/generate", "/v1/models"):
            for headers in ({}, bearer(WRONG), bearer(USER), bearer(ADMIN)):
                assert client.get(path, headers=headers).status_code == 401
        info = client.get("/server_info", headers=bearer(NODES))
        assert info.status_code == 200
        assert not any(secret in info.text for secret in (USER, ADMIN, NODES, CLUSTER, PROMPT))


def test_the_bootstrap_port_is_where_it_was_put(secured: Secured) -> None:
    """The nodes' own ports are bound to the address that was configured, and to no other of this machine."""
    listening = {
        connection.laddr
        for process in (secured.prefill.children(), secured.decode.children())
        for each in process
        for connection in each.net_connections("tcp")
        if connection.status == "LISTEN"
    }
    assert listening and {address.ip for address in listening} == {"127.0.0.1"}


def test_rooms_are_not_a_clients_to_choose(secured: Secured) -> None:
    """A second client that has guessed a room, or that would send decode to a bootstrap endpoint of its own."""
    fields: list[dict[str, Any]] = [
        {"bootstrap_room": 1},
        {"bootstrap_room": [1]},
        {"bootstrap_host": "203.0.113.7", "bootstrap_port": 8998, "bootstrap_room": 1},
        {"resume": {"output_ids": [1]}},
    ]
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 2}},
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
    }
    for path, body in bodies.items():
        for more in fields:
            answer = secured.client.post(path, json=body | more, headers=bearer(USER))
            assert answer.status_code == 400, (path, more)
        # Without a room they change nothing: the router writes its own over them.
        answer = secured.client.post(path, json=body | {"bootstrap_host": "203.0.113.7"}, headers=bearer(USER))
        assert answer.status_code in (200, 400), answer.text


def failures(secured: Secured) -> None:
    """Every kind of request that goes wrong, with the words that no log may have."""
    client, body = secured.client, {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}}
    raw = [f'{{"text": "{PROMPT}', f'["{PROMPT}"]', f'{{"{PROMPT}": 1, "text": "{PROMPT}"}}']
    for content in raw:
        assert client.post("/generate", content=content, headers=bearer(USER)).status_code == 400
    for change in (
        {"text": {"a": PROMPT}},
        {"text": [PROMPT, 3]},
        {"sampling_params": {"stop": [ANSWER, 3]}},
        {"sampling_params": {PROMPT: 1}},
        {"sampling_params": PROMPT},
        {"text": PROMPT * 100_000},
        {"text": PROMPT, "input_ids": [1]},
        {"bootstrap_room": PROMPT},
    ):
        assert 400 <= client.post("/generate", json=body | change, headers=bearer(USER)).status_code < 500
    for headers in ({}, bearer(WRONG), {"authorization": f"Basic {WRONG}"}, {"authorization": WRONG}):
        assert client.post("/generate", json=body, headers=headers).status_code == 401
    assert client.get(f"/nothing?api_key={USER}&q={PROMPT}", headers=bearer(USER)).status_code == 404
    for path, content in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": PROMPT})):
        client.post(path, json=content, headers=bearer(USER))
    late = {"x-request-timeout-s": "0.2"} | bearer(USER)
    slow = {"text": PROMPT, "sampling_params": LONG}
    assert client.post("/generate", json=slow, headers=late).status_code == 504
    with client.stream("POST", "/generate", json=slow | {"stream": True}, headers=bearer(USER)) as answer:
        next(answer.iter_lines())  # and then it leaves


def test_no_log_has_a_key_or_a_prompt(secured: Secured) -> None:
    """Last in this file: it kills the decode rank in mid-answer, then the prefill node."""
    failures(secured)
    body = {"text": PROMPT, "sampling_params": LONG, "stream": True}
    with secured.client.stream("POST", "/generate", json=body, headers=bearer(USER)) as answer:
        lines = answer.iter_lines()
        next(lines)
        secured.decode.rank().send_signal(signal.SIGKILL)
        assert any('"error"' in line for line in lines)
    secured.decode.process.wait(20)
    secured.prefill.process.send_signal(signal.SIGKILL)
    assert ask(secured).status_code == 503
    secured.router.process.send_signal(signal.SIGTERM)
    secured.router.process.wait(20)
    text = secured.logs()
    assert text.count(" INFO ") > 20 and "Traceback" not in text
    secrets = (USER, ADMIN, NODES, CLUSTER, WRONG, PROMPT, ANSWER)
    assert [word for word in secrets if word in text] == []


def test_a_certificate_of_somebody_else_is_not_spoken_to(tmp_path: Path) -> None:
    """A router whose worker shows another authority's certificate says so and sends it nothing, least of all a key."""
    _, tls = certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    other_ca, _ = certificate(other)
    port, router_port = free_port(), free_port()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls[1], tls[3])
    keys = secret_file(tmp_path, "keys", f"admin router {NODES}\n")
    options = ["router", "--port", str(router_port), "--decode", f"https://localhost:{port}"]
    options += ["--prefill", f"https://127.0.0.1:{port}", "8998", "--worker-ca-file", other_ca]
    options += ["--worker-api-key-file", keys]
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(30)
        with running("lone", options, f"http://127.0.0.1:{router_port}", tmp_path):
            sock, _ = listener.accept()
            with sock, pytest.raises(ssl.SSLError, match=r"UNKNOWN_CA|EOF"):
                context.wrap_socket(sock, server_side=True).recv(1)
            wait_for(lambda: "no connection (TLS: CERTIFICATE_VERIFY_FAILED)" in (tmp_path / "lone.log").read_text())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
