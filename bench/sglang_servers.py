"""The servers of `sglang.py` by name: what each is, on a card and on the CPU, and their start and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import tokenizers

from tests.support.stack import MODEL, REPO, Server, free_port, running, stop, wait_healthy

LOG_LINES = 120
_QUIET = ("--log-level", "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One server. words: of `tandem`, without ports; or of a whole command that takes --port, where `is_bare`. router:
    the name of the one that a node registers with."""

    words: tuple[str, ...]
    router: str | None = None
    is_bare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes, and all servers by name. same_weights: the SGLang server that has the native one's weights. decode:
    streams at once; prefill: prompts at once and their tokens; both of `vocabulary`."""

    specs: Mapping[str, Spec]
    same_weights: str
    start_s: float
    prompts: int
    new_tokens: int
    questions: int
    vocabulary: int
    decode: tuple[int, ...]
    context: int
    decode_tokens: int
    prefill: tuple[tuple[int, int], ...]
    repeats: int


# Models


class Models:
    """Folders: tiny, large and mini as SGLang reads them, `native` ones beside them for our nodes. Made in `folder`;
    what is given is only read."""

    def __init__(self, folder: Path, *, tiny: Path, large: Path) -> None:
        self.tiny, self.large = tiny, large
        self.mini = self._linked(MODEL, folder / "mini")
        config = json.loads((MODEL / "config.json").read_text())
        _replace(self.mini / "config.json", json.dumps(config | {"mamba_n_groups": config["n_groups"]}))
        self.native_tiny = self._with_tokenizer(tiny, folder / "native-tiny")
        self.native_large = self._with_tokenizer(large, folder / "native-large")

    def _linked(self, model: Path, made: Path) -> Path:
        made.mkdir()
        for file in model.iterdir():
            (made / file.name).symlink_to(file.resolve())
        return made

    def _with_tokenizer(self, model: Path, made: Path) -> Path:
        """Our nodes want a tokenizer; it has as many tokens as the model."""
        self._linked(model, made)
        if not (made / "tokenizer.json").exists():
            size = json.loads((model / "config.json").read_text())["vocab_size"]
            write_tokenizer(made / "tokenizer.json", size)
        return made


def write_tokenizer(path: Path, size: int) -> None:
    """Words t0, t1 …"""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(path))


def _replace(path: Path, content: str) -> None:
    """In place of a link."""
    path.unlink()
    path.write_text(content)


# What each server is


def card(python: str, models: Models) -> Scale:
    """SGLang's flags are those with which it is known to run there. Every server says how much memory it takes: with
    a share of the card, what the others take while it starts would count as its own."""
    start = ("--grammar-backend", "none", "--skip-server-warmup", "--mem-fraction-static", "0.88")
    small = ("--max-running-requests", "32", "--max-total-tokens", "65536", "--max-mamba-cache-size", "192")
    gate = ("--max-running-requests", "64", "--max-total-tokens", "131072", "--max-mamba-cache-size", "352")
    many = ("--max-running-requests", "128", "--max-total-tokens", "180000")
    few = ("--max-running-requests", "8", "--max-total-tokens", "40960")
    cuda = ("--device", "cuda", "--dtype", "bfloat16")
    dummy = ("--load-format", "dummy")
    ids = ("--skip-tokenizer-init", *start)
    tiny = _Sglang(python, models.tiny, small, (*ids, "--cuda-graph-max-bs-decode", "16"))
    mini = _Sglang(python, models.mini, gate, (*start, "--cuda-graph-max-bs-decode", "16"))
    graphs = ("--cuda-graph-bs-decode", "1", "8")
    off = (*dummy, "--disable-radix-cache")  # a state slot for each request, not five
    whole = _Sglang(python, models.large, (*off, *many), (*ids, *graphs, "32", "128"))
    half = _Sglang(python, models.large, (*off, *few), (*ids, *graphs))
    native = ("--model-path", str(models.native_large), *cuda, *dummy, "--chunked-prefill-size", "8192")
    return Scale(
        specs={
            "plain": tiny.node("unified", "no_buffer"),
            "right": tiny.node("unified", "no_buffer"),
            "faulty": tiny.bare(),
            **tiny.pair("no_buffer", "no_buffer"),
            **tiny.pair("extra_buffer", "extra_buffer"),
            "mini plain": mini.node("unified", "no_buffer"),
            "mini faulty": mini.bare(),
            **_natives(models, cuda),
            "sglang unified": whole.node("unified", None),
            **half.pair("sglang", None),
            "native unified": Spec(words=("unified", *native, *many, "--max-mamba-cache-size", "200")),
            **_native_pair((*native, *few, "--max-mamba-cache-size", "24")),
        },
        same_weights="plain",
        start_s=240.0,
        prompts=32,
        new_tokens=48,
        questions=64,
        vocabulary=131072,
        decode=(1, 8, 32, 128),
        context=1024,
        decode_tokens=160,
        prefill=((1, 1024), (1, 2048), (8, 2048)),
        repeats=5,
    )


def dry(folder: Path, models: Models) -> Scale:
    """Stubs that have no weights, and one that is our own engine."""
    from tests.sglang.conftest import make_python

    folders = [folder / "stub", folder / "stub-native"]
    for each in folders:
        each.mkdir()
    python = make_python(folders[0], STUB_TRANSFER="1", STUB_QUESTIONS="16", STUB_PACE_S="0.005")
    own = make_python(folders[1], STUB_NATIVE=str(models.native_tiny))
    start = ("--grammar-backend", "none", "--skip-server-warmup", "--mem-fraction-static", "0.88")
    ids = ("--skip-tokenizer-init", *start)
    tiny, mini = (_Sglang(python, model, (), args) for model, args in ((models.tiny, ids), (models.mini, start)))
    off = ("--load-format", "dummy", "--disable-radix-cache")
    large = _Sglang(python, models.large, off, (*ids, "--cuda-graph-bs-decode", "1", "2"))
    cpu = ("--device", "cpu", "--dtype", "bfloat16")
    native = ("--model-path", str(models.native_large), *cpu, "--load-format", "dummy")
    return Scale(
        specs={
            "plain": tiny.node("unified", "no_buffer"),
            "plain with weights": _Sglang(own, models.tiny, (), ids).node("unified", "no_buffer"),
            "right": tiny.node("unified", "no_buffer"),
            "faulty": tiny.bare(),
            **tiny.pair("no_buffer", "no_buffer"),
            **tiny.pair("extra_buffer", "extra_buffer"),
            "mini plain": mini.node("unified", "no_buffer"),
            "mini faulty": mini.bare(),
            **_natives(models, cpu),
            "sglang unified": large.node("unified", None),
            **large.pair("sglang", None),
            "native unified": Spec(words=("unified", *native)),
            **_native_pair(native),
        },
        same_weights="plain with weights",
        start_s=150.0,
        prompts=12,
        new_tokens=4,
        questions=16,
        vocabulary=900,
        decode=(1, 2),
        context=64,
        decode_tokens=12,
        prefill=((1, 64), (2, 64)),
        repeats=1,
    )


@dataclass(frozen=True, slots=True)
class _Sglang:
    """SGLang servers of one model. options: ours; passed: its own."""

    python: str
    model: Path
    options: tuple[str, ...]
    passed: tuple[str, ...]

    def node(self, role: str, strategy: str | None, router: str | None = None) -> Spec:
        words = (role, "--engine", "sglang", "--sglang-python", self.python, "--model-path", str(self.model))
        chosen = () if strategy is None else ("--mamba-scheduler-strategy", strategy)
        passed = (f"--sglang-arg={each}" for each in self.passed)
        return Spec(words=(*words, *self.options, *chosen, *passed), router=router)

    def pair(self, name: str, strategy: str | None) -> dict[str, Spec]:
        router = f"{name} router"
        nodes = {f"{name} {role}": self.node(role, strategy, router) for role in ("prefill", "decode")}
        return {router: Spec(words=("router", *_QUIET))} | nodes

    def bare(self) -> Spec:
        """As anybody would start it: with extra_buffer and no limit of a batch."""
        words = (self.python, "-m", "sglang.launch_server", "--model-path", str(self.model), *self.options)
        return Spec(words=(*words, *self.passed, "--mamba-radix-cache-strategy", "extra_buffer"), is_bare=True)


def _natives(models: Models, device: tuple[str, ...]) -> dict[str, Spec]:
    """again: the reference of `native`, with nothing kept."""
    tiny = ("unified", "--model-path", str(models.native_tiny), *device)
    return {
        "native": Spec(words=tiny),
        "again": Spec(words=(*tiny, "--mamba-scheduler-strategy", "no_buffer", "--disable-radix-cache")),
        "mini native": Spec(words=("unified", "--model-path", str(MODEL), *device)),
    }


def _native_pair(options: tuple[str, ...]) -> dict[str, Spec]:
    router = "native router"
    return {
        router: Spec(words=("router", *_QUIET)),
        "native prefill": Spec(words=("prefill", *options, "--transport", "mooncake"), router=router),
        "native decode": Spec(words=("decode", *options, "--transport", "mooncake"), router=router),
    }


# Start and end


@dataclass(slots=True)
class Servers:
    """Those that run, each with all that it has started; they end with this process, however it ends. A context
    manager. folder: of their logs."""

    scale: Scale
    folder: Path
    _running: dict[str, tuple[Server, ExitStack]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(self.names())

    def names(self) -> list[str]:
        return list(self._running)

    def url(self, name: str) -> str:
        return self._running[name][0].url

    def start(self, names: Sequence[str]) -> None:
        """Begin to; those that run already are left alone. Routers come before what registers with them."""
        missing = [name for name in dict.fromkeys(names) if name not in self._running]
        for name in sorted(missing, key=self._is_router, reverse=True):
            exits = ExitStack()
            self._running[name] = self._start(name, self.scale.specs[name], exits), exits

    def _is_router(self, name: str) -> bool:
        return self.scale.specs[name].words[0] == "router"

    def _start(self, name: str, spec: Spec, exits: ExitStack) -> Server:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        if spec.is_bare:
            return self._start_bare(name, [*spec.words, "--port", str(port)], url, exits)
        words = [*spec.words, "--port", str(port), "--parent-pid", str(os.getpid())]
        if spec.words[0] == "prefill":
            words += ["--bootstrap-port", str(free_port())]
        if spec.router is not None:
            words += ["--router", self.url(spec.router)]
        return exits.enter_context(running(name.replace(" ", "-"), words, url, self.folder))

    def _start_bare(self, name: str, words: Sequence[str], url: str, exits: ExitStack) -> Server:
        log = self.folder / f"{name.replace(' ', '-')}.log"
        leash = [sys.executable, "-m", "node.sglang.leash", "1", *words]
        with log.open("wb") as output:
            process = subprocess.Popen(
                leash,
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        exits.callback(stop, process)
        return Server(name=name, process=process, url=url, log=log)

    def settle(self, names: Sequence[str]) -> None:
        """Until all of them are ready or it is clear that some will not be; `wait` tells. A router is not waited for
        when a node of its own has failed."""
        deadline_s, failed = time.monotonic() + self.scale.start_s, set[str | None]()
        for name in sorted(dict.fromkeys(names), key=self._is_router):
            if name in failed:
                continue
            try:
                wait_healthy(self._running[name][0], max(0.1, deadline_s - time.monotonic()))
            except AssertionError as error:
                print(f"{name}: {str(error)[-1500:]}", file=sys.stderr, flush=True)
                failed.add(self.scale.specs[name].router)

    def wait(self, names: Sequence[str]) -> None:
        """Raises AssertionError for the first that is not ready, with what it said last."""
        for name in names:
            wait_healthy(self._running[name][0], 5.0)

    def end(self, names: Sequence[str]) -> None:
        """At once: none of them has anything left to do. All are told before one is waited for."""
        gone = [self._running.pop(name) for name in names]
        for server, _ in gone:
            if server.process.poll() is None:
                server.process.terminate()
        for _, exits in gone:
            exits.close()

    def keep_logs(self, path: Path) -> None:
        """The last lines of all, those that have ended too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as kept:
            for log in sorted(self.folder.glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                kept.write("\n".join([f"==> {log.name}", *(line[:400] for line in lines), ""]))
