"""A node that cannot serve says why in one line, names the setting, and exits non-zero; a foreign peer is refused."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.support.stack import MODEL, REPO, command, free_port, generate, stack


def start_and_fail(*arguments: str) -> str:
    """Run `tandem <arguments>`, which must refuse to start; returns what it said."""
    done = subprocess.run(command(*arguments), cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, None), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def copy_model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def test_missing_model_folder() -> None:
    assert "/nowhere" in start_and_fail("unified", "--model-path", "/nowhere", "--port", str(free_port()))


def test_truncated_weights(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    message = start_and_fail("unified", "--model-path", str(model), "--port", str(free_port()))
    assert "model.safetensors" in message


def test_missing_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = copy_model(tmp_path)
    tensors = load_file(model / "model.safetensors")
    del tensors["backbone.norm_f.weight"]
    save_file(tensors, model / "model.safetensors")
    message = start_and_fail("unified", "--model-path", str(model), "--port", str(free_port()))
    assert "norm_f.weight" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("hybrid_override_pattern", "M-R*-"), ("quantization_config", {"bits": 4}), ("model_type", "llama")],
)
def test_a_model_that_the_engine_cannot_run_is_refused_by_its_key(tmp_path: Path, key: str, value: object) -> None:
    model = copy_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config.pop("layers_block_type", None)
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    assert key in start_and_fail("unified", "--model-path", str(model), "--port", str(free_port()))


def test_port_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for role in ("unified", "decode"):
            assert port in start_and_fail(role, "--port", port)
        assert port in start_and_fail("router", "--port", port, "--decode", "http://127.0.0.1:1", "--prefill",
                                      "http://127.0.0.1:2", "3")  # fmt: skip
        assert port in start_and_fail("prefill", "--port", str(free_port()), "--disaggregation-bootstrap-port", port)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--page-size", "24"),
        ("--chunked-prefill-size", "32"),
        ("--context-length", "1000000"),
        ("--max-mamba-cache-size", "1"),
        ("--max-total-tokens", "16"),
    ],
)
def test_impossible_sizes_are_refused_by_name(option: str, value: str) -> None:
    assert option in start_and_fail("unified", option, value, "--port", str(free_port()))


def test_unreachable_transfer_host_is_refused() -> None:
    assert "0.0.0.0" in start_and_fail("decode", "--transfer-host", "0.0.0.0", "--port", str(free_port()))


def test_rdma_without_a_device_is_refused_not_replaced_by_tcp() -> None:
    message = start_and_fail(
        "decode", "--transfer-protocol", "rdma", "--transfer-device", "mlx5_nope", "--port", str(free_port())
    )
    assert "rdma" in message and "mlx5_nope" in message


@pytest.mark.parametrize(
    ("decode_extra", "named"),
    [
        (["--page-size", "32"], ("page_size", "16", "32")),
        (["--mamba-ssm-dtype", "bfloat16"], ("float32", "bfloat16")),
    ],
)
def test_a_decode_node_with_another_layout_is_refused_with_both_values(
    tmp_path: Path, decode_extra: list[str], named: tuple[str, ...]
) -> None:
    body = {"text": "Question:", "sampling_params": {"max_new_tokens": 3}}
    with stack(tmp_path, decode_extra=decode_extra, wait_for_router=False) as running:
        fingerprints = [fingerprint(running.prefill.url), fingerprint(running.decode.url)]
        through_router = until_refused_for(running.router.url, body, fingerprints)
        assert through_router.status_code == 503, through_router.text
        legs = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(running.prefill.url)}
        by_hand = generate(running.decode.url, {**body, **legs, "bootstrap_room": 1})
        assert by_hand.status_code >= 400
        assert all(value in by_hand.json()["error"]["message"] for value in named), by_hand.text
        assert running.decode.is_idle()


def until_refused_for(url: str, body: dict[str, object], values: list[str], timeout_s: float = 10.0) -> httpx.Response:
    """Ask until the refusal names these values: at first the router has not seen its workers yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        response = generate(url, body)
        if all(value in response.text for value in values) or time.monotonic() > deadline:
            return response
        time.sleep(0.1)


def fingerprint(url: str) -> str:
    return str(httpx.get(f"{url}/server_info").json()["fingerprint"])


def bootstrap_port(url: str) -> int:
    return int(httpx.get(f"{url}/server_info").json()["disaggregation_bootstrap_port"])
